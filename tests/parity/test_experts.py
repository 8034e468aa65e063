"""Models with experts in one process: trained as transformers computes them, and sampled with the numbers they are trained with.

float32, to 1e-5 of a number's size: products of all experts at once, and of one after another, add up in another order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ray_runs import config, metrics_of
from test_update_paths import PLAN, assert_alike, make_batch, make_engine, run
from torch import Tensor
from transformers import AutoModelForCausalLM

from posttrain.build.train import train_run
from posttrain.models.tiny import Family, write_tiny_model
from posttrain.records.batches import SequenceBatch

pytestmark = pytest.mark.slow


def logprobs_of_transformers(folder: Path, batch: SequenceBatch) -> Tensor:
    """Of every response token, sequence by sequence, by the model's own code for one expert after another; 0 behind responses."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    found = torch.zeros(batch.response_mask.shape)
    begin = batch.tokens.shape[1] - found.shape[1]  # of responses
    for row, tokens in enumerate(batch.tokens):
        prompt, response = int(batch.prompt_lengths[row]), int(batch.response_mask[row].sum())
        ids = tokens[begin - prompt : begin + response]
        with torch.no_grad():
            scores = (model(ids[None]).logits[0] / PLAN.temperature).log_softmax(-1)
        found[row, :response] = scores[prompt - 1 : -1].gather(1, ids[prompt:, None])[:, 0]
    return found


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral"])
def test_updates_are_those_of_transformers_experts(tmp_path: Path, family: Family) -> None:
    folder = write_tiny_model(tmp_path, family)
    wanted = run(make_engine(folder))
    batch = make_batch(0).sequences
    scored = torch.where(batch.response_mask, wanted.scored, 0.0)
    plain = logprobs_of_transformers(folder, batch)
    assert (scored - plain).norm() < 1e-5 * plain.norm()
    ways: tuple[dict[str, Any], ...] = ({"micro": 1}, {"micro": 5, "padded": True})
    for how in ways:
        assert_alike(run(make_engine(folder, **how)), wanted, 1e-5)
    before = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    router = "model.layers.1.mlp.gate.weight"
    assert (wanted.weights[router] - before[router]).norm() > 1e-3  # it learns, too


def test_they_are_sampled_with_the_same_numbers(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", "qwen3_moe")
    found = metrics_of(train_run(config(tmp_path, model, "run", {}, steps=2)))
    assert len(found) == 2 and all(step["gap/max"] < 1e-5 and step["policy/grad_norm"] > 0.1 for step in found)
