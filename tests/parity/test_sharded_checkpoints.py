"""Checkpoints of which every process has written its own part: a run goes on from them anywhere, and export makes them whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ray_runs import assert_same, config
from safetensors.torch import load_file

from posttrain.build.train import train_run
from posttrain.models.tiny import write_tiny_model
from posttrain.run.export import Role, export_checkpoint

Changes = dict[str, dict[str, Any]]
SHARDED = {"every_steps": 1, "sharded": True, "export_every_steps": 1}
PPO: Changes = {
    "advantage": {"name": "gae"},
    "policy": {"sequences_per_mini_batch": 4, "optimizer": {"lr": 1e-3, "eps": 1e-3}},
    "critic": {"sequences_per_mini_batch": 4, "optimizer": {"lr": 1e-3, "eps": 1e-3}},
}


def assert_exported(run: Path, step: int, role: Role, out: Path) -> None:
    """The merged folder is the one that the run has gathered and written itself, byte for byte."""
    export_checkpoint(run / "checkpoints" / f"global_step_{step}", out, role)
    gathered = run / "exports" / f"global_step_{step}" / role
    assert {path.name for path in out.iterdir()} == {path.name for path in gathered.iterdir()}
    for path in gathered.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_in_one_process(tmp_path: Path, family: Any) -> None:
    model = write_tiny_model(tmp_path / "model", family)
    whole = train_run(config(tmp_path, model, "whole", {}, steps=2))
    straight = train_run(config(tmp_path, model, "straight", {"checkpoint": SHARDED}, steps=2))
    for steps in (1, 2):
        cut = train_run(config(tmp_path, model, "cut", {"checkpoint": SHARDED}, steps=steps))
    for folder in (straight, cut):
        policy = folder / "checkpoints/global_step_2/policy"
        assert not (policy / "model.safetensors").exists() and not (policy / "optimizer.safetensors").exists()
        assert_exported(folder, 2, "policy", folder / "out")
        (weights,) = (policy / "weights").iterdir()
        there = straight / "checkpoints/global_step_2/policy/weights" / weights.name
        assert weights.read_bytes() == there.read_bytes()
    mine, theirs = (
        load_file(cut / "out/model.safetensors"),
        load_file(whole / "checkpoints/global_step_2/policy/model.safetensors"),
    )
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())


@pytest.mark.slow
def test_from_ranks_to_other_ranks(address: str, tmp_path: Path, tiny_llama: Path) -> None:
    """A step on two ranks of fsdp, one on two of megatron, one in one process: as if nothing had changed."""
    pytest.importorskip("ray")
    pytest.importorskip("megatron.core")
    alone = train_run(config(tmp_path, tiny_llama, "alone", PPO))
    two = {"placement": {"device": "cpu", "cpu_threads": 1, "devices": 2, "ray_address": address}}
    sides: list[tuple[dict[str, Any], Changes]] = [
        ({"engine": "fsdp"}, two | {"checkpoint": SHARDED}),
        ({"engine": "megatron", "tensor_parallel": 2}, two | {"checkpoint": SHARDED | {"background": False}}),
        ({}, {"checkpoint": {"every_steps": 1}}),
    ]
    for steps, (engine, changes) in enumerate(sides, start=1):
        roles = {role: PPO[role] | engine for role in ("policy", "critic")}
        sections = PPO | roles | changes
        folder = train_run(config(tmp_path, tiny_llama, "run", sections, steps=steps), allow_config_change=True)
        checkpoint = folder / f"checkpoints/global_step_{steps}"
        for role in ("policy", "critic"):
            if steps < 3:
                assert len(list((checkpoint / role / "weights").iterdir())) == 2, "each rank writes"
                assert len(list((checkpoint / role / "optimizer").iterdir())) == 2
                assert_exported(folder, steps, role, tmp_path / f"{role}-{steps}")  # type: ignore[arg-type]
    assert_same(folder, alone, roles=("policy", "critic"))
