"""Every engine starts from the file's weights, not from what is left of them in the precision of a pass.

Two updates with bfloat16 passes, by one device and by one process of fsdp: both round the same float32 weights to the same
bfloat16 ones, so losses agree to float32's precision of a sum, 1e-5. Masters differ by what rounding does to gradients: the
local engine adds bfloat16 gradients to float32, and so does fsdp, micro-batch by micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoTokenizer

from batches import sequence_batch, train_batch
from posttrain.backends.torch_training.sharding import Sharding
from posttrain.backends.torch_training.start import load_policy, start_sft_policy
from posttrain.backends.train.fsdp.sharding import FsdpSharding
from posttrain.config import SftConfig
from posttrain.records.batch_plans import SftBatchPlan
from posttrain.records.batches import TrainBatch
from posttrain.records.notices import Notices
from posttrain.records.plans import LossPlan

CROSS_ENTROPY = LossPlan(name="cross_entropy", parameters={}, aggregation="token_mean", temperature=1.0)
PLAN = SftBatchPlan(
    devices=1,
    sequences_per_step=4,
    sequences_per_micro_batch_per_device=4,
    gradient_accumulation_steps=1,
    steps_per_epoch=2,
    total_steps=2,
    schedule_updates=2,
)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_batch(seed: int) -> TrainBatch:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(4, 8, dtype=torch.bool)
    sequences = sequence_batch(
        tokens=torch.randint(0, 256, (4, 12), generator=generator),
        prompt_lengths=torch.full((4,), 4),
        response_mask=mask,
        rollout_logprobs=torch.zeros(4, 8),
        group_index=torch.arange(4),
        sample_ids=tuple("abcd"),
    )
    return train_batch(sequences, advantages=torch.ones(4, 8), loss_mask=mask)


def make(folder: Path, engine: str, sharding: Sharding | None = None, **model: str) -> Any:
    sections = {
        "model": {"path": str(folder), **model},
        "data": {"train_files": ["none"]},
        "policy": {"engine": engine, "optimizer": {"lr": 1e-2, "eps": 1e-3}},
        "placement": {"device": "cpu", "cpu_threads": 1},
    }
    config = SftConfig.model_validate(sections)
    loaded, _ = load_policy(config, torch.device("cpu"), dtype=torch.float32 if sharding else None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return start_sft_policy(config, PLAN, tokenizer, loaded, Notices(), sharding)


def test_masters_are_the_files_weights(tiny_qwen: Path) -> None:
    engine = make(tiny_qwen, "local")
    stored = load_file(tiny_qwen / "model.safetensors")
    rounded = 0
    for name, master in engine._masters.parameters.items():
        assert torch.equal(master, stored[name]), name
        weight = engine.model.get_parameter(name)
        assert torch.equal(weight, stored[name].bfloat16())
        rounded += int(not torch.equal(weight.float(), stored[name]))
    assert rounded == len(engine._masters.parameters)


def test_masters_get_their_values_when_these_are_first_needed(tiny_qwen: Path, tmp_path: Path) -> None:
    """Read, updated or loaded first: the same masters, to the bit. Names and shapes need no values."""
    stored = load_file(tiny_qwen / "model.safetensors")
    engines = [make(tiny_qwen, "local") for _ in range(3)]
    for engine in engines:
        assert {name: each.shape for name, each in engine._masters.trained.items()} == {
            name: stored[name].shape for name in engine._masters.trained
        }
    read = dict(engines[0]._masters.whole(engines[0]._sharding))
    assert all(torch.equal(master, stored[name]) for name, master in read.items())
    engines[0].save(tmp_path / "saved")
    engines[2].load(tmp_path / "saved")
    batch, found = make_batch(0), []
    for engine in engines:
        engine.forward_backward(batch, CROSS_ENTROPY, batch.counts())
        engine.optimizer_step()
        found.append(dict(engine._masters.whole(engine._sharding)))
    assert not torch.equal(found[0]["lm_head.weight"], stored["lm_head.weight"])
    for other in found[1:]:
        assert all(torch.equal(master, other[name]) for name, master in found[0].items())


def test_a_file_in_bfloat16_is_read_once(tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.backends.torch_training import start

    loaded, load = [], start.load_causal_lm
    start.load_causal_lm(str(tiny_qwen), dtype=torch.bfloat16).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_qwen).save_pretrained(tmp_path)
    monkeypatch.setattr(start, "load_causal_lm", lambda path, **how: loaded.append(path) or load(path, **how))
    make(tmp_path, "local")
    assert loaded == [str(tmp_path)]
    loaded.clear()
    make(tiny_qwen, "local")
    assert loaded == [str(tiny_qwen)] * 2
    loaded.clear()
    make(tiny_qwen, "local", compute_dtype="float32")  # masters are the weights themselves
    assert loaded == [str(tiny_qwen)]


def test_local_is_fsdp_with_one_process(tiny_qwen: Path, alone: None) -> None:
    engines = [
        make(tiny_qwen, "local"),
        make(tiny_qwen, "fsdp", FsdpSharding("cpu", param_dtype=torch.bfloat16)),
    ]
    found = []
    for engine in engines:
        losses = []
        for seed in range(3):
            batch = make_batch(seed)
            losses.append(engine.forward_backward(batch, CROSS_ENTROPY, batch.counts()).loss)
            engine.optimizer_step()
        found.append((losses, dict(engine._masters.whole(engine._sharding))))
    (mine, my_weights), (theirs, their_weights) = found
    assert mine == pytest.approx(theirs, rel=1e-5)
    for name, weight in my_weights.items():
        assert (weight - their_weights[name]).norm() < 1e-5 * weight.norm(), name
