"""Checkpoints of a model that is shared out over two processes: they fit one process, and the other way round; and one that a
process died in is no checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from killing import Position
from torch import Tensor

from posttrain.backends.torch_training.policy import PolicyModel
from posttrain.backends.train.fsdp import FsdpTrainEngine
from posttrain.backends.train.fsdp.sharding import FsdpSharding
from posttrain.backends.train.local import LocalTrainEngine
from posttrain.config.model import ModelConfig
from posttrain.config.policy import OptimizerConfig
from posttrain.models.loading import load_causal_lm, load_tokenizer
from posttrain.run.checkpoint import Checkpoints
from posttrain.run.checkpoint_folders import steps_in
from posttrain.run.progress import Progress
from warm.processes import on_ranks

FILES = ("model.safetensors", "optimizer.safetensors", "engine.json", "config.json")


def make(model: Path, kind: type[PolicyModel] = LocalTrainEngine, **how: Any) -> PolicyModel:
    return kind(
        load_causal_lm(str(model), dtype=torch.float32),
        load_tokenizer(ModelConfig(path=str(model))),
        optimizer=OptimizerConfig(lr=1e-2),
        learning_rate_factor=lambda update: 1.0,
        sequences_per_micro_batch=1,
        sequences_per_scoring_batch=1,
        **how,
    )


def updated(engine: PolicyModel) -> PolicyModel:
    """After an update whose gradient is half of each weight."""
    for weight in engine._masters.parameters.values():
        weight.grad = weight.detach() * 0.5
    engine.optimizer_step()
    return engine


def process(rank: int, model: Path, out: Path) -> None:
    """One of two: saves what it has learned, takes over what one process has saved, saves that, and dies in the next save."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/meet", rank=rank, world_size=2)
    sharding = FsdpSharding("cpu", param_dtype=torch.float32)
    engine = updated(make(model, FsdpTrainEngine, sharding=sharding))
    save = saver(rank, engine, out / "of_two")
    save(1)
    engine.load(out / "of_one/global_step_1/policy")
    save(2)
    if rank == 1:
        gather, tensors = sharding.whole, []

        def dying(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            if len(tensors) == 5:
                os._exit(9)
            return gather(tensor)

        sharding.whole = dying  # type: ignore[method-assign]
    save(3)


def saver(rank: int, engine: PolicyModel, folder: Path) -> Callable[[int], object]:
    """The first process writes the checkpoint; the other takes its part in it."""
    if rank == 0:
        checkpoints = Checkpoints(folder)
        return lambda step: checkpoints.save(step, Progress(policy=engine, loader=Position(step)))
    return lambda step: engine.save(folder)


@pytest.mark.slow
def test_two_processes_and_one(tiny_llama: Path, tmp_path: Path) -> None:
    one = updated(make(tiny_llama))
    Checkpoints(tmp_path / "of_one").save(1, Progress(policy=one, loader=Position(1)))
    with pytest.raises(RuntimeError, match="a rank ended with exit code"):
        on_ranks(process, (tiny_llama, tmp_path), 2)

    of_two, position = Checkpoints(tmp_path / "of_two"), Position()
    fresh = make(tiny_llama)
    assert of_two.restore(Progress(policy=fresh, loader=position), lambda said: None) == 2, (
        "the third save was not finished"
    )
    assert (position.position, fresh.version) == (2, 1)
    assert steps_in(tmp_path / "of_two") == [1, 2]
    fresh.load(tmp_path / "of_two/global_step_1/policy")
    Checkpoints(tmp_path / "again").save(1, Progress(policy=fresh, loader=Position(1)))

    def content(place: str, name: str) -> bytes:
        return (tmp_path / place / "policy" / name).read_bytes()

    for name in FILES:
        # Two save, one loads and saves again; one saves, two load and save again.
        assert content("again/global_step_1", name) == content("of_two/global_step_1", name), name
        assert content("of_two/global_step_2", name) == content("of_one/global_step_1", name), name
