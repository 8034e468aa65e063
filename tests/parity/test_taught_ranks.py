"""Runs with teachers on two ranks have the numbers of a run in one process, with either engine that shards weights.

``whole`` computes the teacher inside the student's forward pass, in every process; ``sampled`` and ``top`` ask it before the
update, where it is sharded like the reference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray_runs import assert_same, config

from posttrain.build.train import train_run
from posttrain.models.tiny import write_tiny_model
from posttrain.registry import is_installed

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

DEEPSPEED = pytest.mark.skipif(not is_installed("deepspeed"), reason="needs deepspeed")
HOW: dict[str, dict[str, Any]] = {
    "whole": {"divergence": {"name": "reverse_kl"}, "enters": "loss"},
    "top": {"divergence": {"name": "forward_kl"}, "top_k": 5, "enters": "loss"},
    "sampled": {"divergence": {"name": "sampled_kl"}, "enters": "advantage"},
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("teacher"), seed=7)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("engine", ["fsdp", pytest.param("deepspeed", marks=DEEPSPEED)])
def test_two_ranks_learn_from_a_teacher_as_one_process_does(
    address: str, tmp_path: Path, tiny_llama: Path, teacher: Path, engine: str, how: str
) -> None:
    taught = {"distillation": {"teachers": {"other": {"path": str(teacher)}}, **HOW[how]}}
    two = {"policy": {"engine": engine}, "placement": {"devices": 2, "runtime": "ray", "ray_address": address}}
    alone = train_run(config(tmp_path, tiny_llama, "alone", taught))
    assert_same(train_run(config(tmp_path, tiny_llama, "run", taught | two)), alone)


def test_a_teacher_on_a_device_of_its_own_gives_the_numbers_of_one_process(
    address: str, tmp_path: Path, tiny_llama: Path, teacher: Path
) -> None:
    taught = {"distillation": {"teachers": {"other": {"path": str(teacher)}}, **HOW["top"]}}
    alone = train_run(config(tmp_path, tiny_llama, "alone", taught))
    apart = {
        "distillation": {"teachers": {"other": {"path": str(teacher), "devices": [1]}}, **HOW["top"]},
        "policy": {"devices": [0]},
        "rollout": {"devices": [0]},
        "reference": {"devices": [0]},
        "placement": {"devices": 2, "runtime": "ray", "ray_address": address},
    }
    assert_same(train_run(config(tmp_path, tiny_llama, "run", apart)), alone)


FEWER = {
    "whole": ({"engine": "megatron", "tensor_parallel": 2}, [2]),
    "sharded": ({"engine": "fsdp", "sequence_parallel": 2}, [2, 3, 4]),
}


@pytest.mark.parametrize("how", FEWER)
def test_a_teacher_on_devices_that_take_no_copy_of_the_policy_gives_the_numbers_of_one_process(
    address: str, tmp_path: Path, tiny_llama: Path, teacher: Path, how: str
) -> None:
    policy, devices = FEWER[how]
    if policy["engine"] == "megatron" and not is_installed("megatron"):
        pytest.skip("needs megatron-core")
    taught = {"distillation": {"teachers": {"other": {"path": str(teacher)}}, **HOW["top"]}}
    alone = train_run(config(tmp_path, tiny_llama, "alone", taught))
    apart = {
        "distillation": {"teachers": {"other": {"path": str(teacher), "devices": devices}}, **HOW["top"]},
        "policy": {**policy, "devices": [0, 1]},
        "rollout": {"devices": [0, 1]},
        "reference": {"devices": [0, 1]},
        "placement": {"devices": devices[-1] + 1, "runtime": "ray", "ray_address": address},
    }
    assert_same(train_run(config(tmp_path, tiny_llama, "run", apart)), alone)
