"""Arithmetic of an update, by hand, and what is not counted."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from batches import sequence_batch, train_batch
from posttrain.config.lora import LoraConfig
from posttrain.models.loading import load_causal_lm
from posttrain.models.lora import add_adapter
from posttrain.models.work import matrix_flops_per_s, work_of
from posttrain.records.batches import SequenceBatch
from posttrain.records.work import Work
from posttrain.run.clock import Clock
from posttrain.run.trackers import Trackers

LAYERS, HEAD = 1000, 50


def batch() -> SequenceBatch:
    """Two responses (2 and 1 tokens) to a prompt of 3 tokens, one (2 tokens) to a prompt of 4."""
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    return sequence_batch(
        tokens=torch.zeros(3, 6, dtype=torch.int64),
        prompt_lengths=torch.tensor([3, 3, 4]),
        response_mask=mask,
        rollout_logprobs=torch.zeros(3, 2),
        group_index=torch.tensor([0, 0, 1]),
        sample_ids=("a", "b", "c"),
    )


@pytest.mark.parametrize(("shared", "prompt_tokens"), [(False, 3 + 3 + 4), (True, 3 + 4)])
def test_six_operations_per_token_and_parameter(shared: bool, prompt_tokens: int) -> None:
    work = Work(layer_parameters=LAYERS, head_parameters=HEAD, flops_per_s=1e6, shares_prompts=shared)
    assert work.update_flops(batch()) == 6 * (LAYERS * (prompt_tokens + 5) + HEAD * 5)


def test_matrices_of_a_model_are_counted(tiny_llama: Path, tiny_qwen: Path) -> None:
    """Width 32, 4 heads of 8 on 2, inner width 64, 2 layers, 259 tokens."""
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64  # q; k and v; o; gate, up and down
    for path in (tiny_llama, tiny_qwen):  # shared and separate embeddings
        work = work_of(load_causal_lm(str(path), dtype=torch.float32, device=torch.device("cpu")), shares_prompts=True)
        assert work is not None and work.flops_per_s > 0
        assert (work.layer_parameters, work.head_parameters) == (2 * layer, 259 * 32)


def test_an_adapter_is_not_counted(tiny_llama: Path) -> None:
    model = load_causal_lm(str(tiny_llama), dtype=torch.float32, device=torch.device("cpu"))
    add_adapter(model, LoraConfig(rank=2), seed=0)
    assert work_of(model, shares_prompts=True) is None


def test_the_share_and_the_speeds_of_a_step() -> None:
    clock = Clock(Trackers([], []), 1)
    for phase in ("rollout", "logprobs", "update"):
        with clock.phase(phase):
            time.sleep(0.01)
    train = train_batch(batch(), ref=torch.zeros(3, 2))
    work = Work(layer_parameters=LAYERS, head_parameters=HEAD, flops_per_s=1e8, shares_prompts=False)
    speeds, seconds = clock.throughput(5, train, work, epochs=2), clock.metrics()
    assert set(speeds) == {
        "speed/rollout_tokens_per_s",
        "speed/logprobs_tokens_per_s",
        "speed/update_tokens_per_s",
        "speed/update_peak_share",
    }
    assert speeds["speed/rollout_tokens_per_s"] == pytest.approx(5 / seconds["time/rollout_s"])
    assert speeds["speed/logprobs_tokens_per_s"] == pytest.approx(15 / seconds["time/logprobs_s"])  # 10 + 5 tokens
    flops = 2 * 6 * (LAYERS * 15 + HEAD * 5)  # two passes
    assert speeds["speed/update_peak_share"] == pytest.approx(flops / seconds["time/update_s"] / 1e8)
    without = clock.throughput(5, train_batch(batch()))  # no log-probs were computed, no peak is known
    assert set(without) == {"speed/rollout_tokens_per_s", "speed/update_tokens_per_s"}


def test_a_peak_is_above_what_single_operations_reach() -> None:
    assert matrix_flops_per_s(torch.device("cpu"), torch.float32) > 1e8
