"""Runs that DeepSpeed trains on two ranks have the numbers of a run in one process: samples, rewards, losses, gradients, weights.

float32: to 1e-5 of a number's size; below 1e-6 numbers are the rounding of others. What one update does, stage by stage, is in
test_update_paths.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray_runs import assert_same, config

from posttrain.build.train import train_run
from posttrain.registry import is_installed

pytest.importorskip("ray")
# Looked for, not imported: that takes seconds, also where none of these tests is run.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not is_installed("deepspeed"), reason="needs deepspeed")]

Changes = dict[str, dict[str, Any]]
PPO: Changes = {
    "advantage": {"name": "gae"},
    "critic": {"sequences_per_micro_batch_per_device": 1, "optimizer": {"lr": 1e-3}},
}


def spread(address: str, stage: int, **more: Any) -> Changes:
    """Policy and reference over two ranks; what is given belongs to zero_optimization."""
    options = {"bf16": {"enabled": False}, "zero_optimization": {"stage": stage, **more}}
    return {
        "policy": {"engine": "deepspeed", "engine_options": options},
        "placement": {"devices": 2, "runtime": "ray", "ray_address": address},
    }


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    return train_run(config(tmp_path_factory.mktemp("alone"), tiny_llama, "run", {}))


def test_two_steps_on_two_ranks(address: str, in_process: Path, tmp_path: Path, tiny_llama: Path) -> None:
    """Weights in parts, gathered for the samplers, which sit where they are trained."""
    changes = spread(address, 3, stage3_param_persistence_threshold="auto", reduce_bucket_size=5e8)
    assert_same(train_run(config(tmp_path, tiny_llama, "run", changes)), in_process)


def test_a_run_moves_to_another_engine_and_back(
    address: str, in_process: Path, tmp_path: Path, tiny_llama: Path
) -> None:
    """Steps one and three in one process, the second on two ranks: checkpoints are the same for all engines."""
    sides: list[Changes] = [{}, spread(address, 2, offload_optimizer={"device": "cpu"}), {}]
    for steps, changes in enumerate(sides, start=1):
        folder = train_run(config(tmp_path, tiny_llama, "run", changes, steps=steps), allow_config_change=True)
    assert_same(folder, in_process)


def test_a_critic_beside_the_policy(address: str, tmp_path: Path, tiny_llama: Path) -> None:
    alone = train_run(config(tmp_path, tiny_llama, "alone", PPO))
    two = spread(address, 2)
    critic = PPO["critic"] | {"engine": "deepspeed", "engine_options": {"zero_optimization": {"stage": 3}}}
    found = train_run(config(tmp_path, tiny_llama, "run", PPO | two | {"critic": critic}))
    assert_same(found, alone)
