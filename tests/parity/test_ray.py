"""A run whose models live in workers gives the numbers of a run in one process: samples, rewards, losses, gradients, weights.

float32: to 1e-5 of a number's size; below 1e-6 numbers are the rounding of others (the gap between sampler and trainer).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from posttrain.build import train_run
from posttrain.config import RunConfig

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return sum(solution_str.encode()) % 5 / 4
"""
SHARDED = {"policy": {"engine": "fsdp"}, "placement": {"devices": 2}}
# What is different from a run in one process, by name: changes of sections.
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "one rank": {},
    "two ranks, sampling where they train": SHARDED,
    "two ranks that share sequences, the reference's parts on the CPU": {
        "policy": {"engine": "fsdp", "sequence_parallel": 2},
        "reference": {"engine_options": {"param_offload": True}},
        "placement": {"devices": 2},
    },
    "two nodes": SHARDED | {"placement": {"devices": 2, "nodes": 2}},
    "two ranks, two samplers elsewhere, through shared memory": {
        "policy": {"engine": "fsdp", "devices": [0, 1]},
        "reference": {"devices": [0, 1]},
        "rollout": {"devices": [2, 3], "weight_bucket_mib": 1},
        "placement": {"devices": 4},
    },
    "one rank, a sampler and two references elsewhere, by broadcast": {
        "policy": {"devices": [0]},
        "reference": {"devices": [1, 2]},
        "rollout": {"devices": [1], "weight_sync": "collective"},
        "placement": {"devices": 3},
    },
}


def config(folder: Path, model: Path, name: str, changes: dict[str, dict[str, Any]], *, steps: int = 2) -> RunConfig:
    """Steps of two prompts x four samples in two updates, with a KL to the reference."""
    (folder / "reward.py").write_text(REWARD)
    rows = [{"data_source": "sums", "prompt": f"{n}+{n}=", "reward_model": {"ground_truth": "x"}} for n in range(8)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections: dict[str, dict[str, Any]] = {
        "run": {"total_steps": steps, "folder": str(folder / name)},
        "model": {"path": str(model), "compute_dtype": "float32"},
        "data": {"train_files": [str(folder / "train.jsonl")], "prompts_per_step": 2},
        "rollout": {"samples_per_prompt": 4, "max_response_tokens": 6},
        "reward": {"workers": 1, "terms": [{"name": "score", "path": str(folder / "reward.py")}]},
        "loss": {"kl_coef": 0.01},
        "policy": {
            "sequences_per_mini_batch": 4,
            "sequences_per_micro_batch_per_device": 1,
            "optimizer": {"lr": 1e-3},
        },
        "checkpoint": {"every_steps": 1},
        "tracking": {"trackers": []},
        "placement": {"device": "cpu", "cpu_threads": 1},
    }
    names = {**sections, **changes}
    return RunConfig.model_validate({name: sections.get(name, {}) | changes.get(name, {}) for name in names})


def metrics_of(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "speed/", "memory/"))} for line in lines]


def assert_same(found: Path, expected: Path, *, step: int = 2) -> None:
    for here, there in zip(metrics_of(found), metrics_of(expected), strict=True):
        assert here.keys() == there.keys()
        for name, value in there.items():
            assert math.isclose(here[name], value, rel_tol=1e-5, abs_tol=1e-6), f"{name}: {here[name]}, not {value}"
    for name in ("model.safetensors", "optimizer.safetensors"):
        path = f"checkpoints/global_step_{step}/policy/{name}"
        mine, theirs = load_file(found / path), load_file(expected / path)
        assert mine.keys() == theirs.keys()
        for key, tensor in theirs.items():
            torch.testing.assert_close(
                mine[key], tensor, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
            )


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    return train_run(config(folder, tiny_llama, "run", {}))


@pytest.mark.parametrize("way", WAYS)
def test_the_numbers_of_a_run_in_one_process(
    way: str, address: str, in_process: Path, tmp_path: Path, tiny_llama: Path
) -> None:
    changes = WAYS[way]
    changes = changes | {"placement": changes.get("placement", {}) | _ray(address)}
    folder = train_run(config(tmp_path, tiny_llama, "run", changes))
    assert_same(folder, in_process)
    workers = json.loads((folder / "workers" / "workers.json").read_text())
    assert len({worker["node"] for worker in workers.values()}) == changes["placement"].get("nodes", 1)


@pytest.mark.parametrize("first", ["saved on two ranks", "saved in one process"])
def test_a_run_goes_on_with_another_number_of_ranks(
    first: str, address: str, in_process: Path, tmp_path: Path, tiny_llama: Path
) -> None:
    """One step on one side, the second on the other: as if nothing had changed."""
    ray = SHARDED | {"placement": SHARDED["placement"] | _ray(address)}
    sides = [ray, {}] if first == "saved on two ranks" else [{}, ray]
    for steps, changes in enumerate(sides, start=1):
        folder = train_run(config(tmp_path, tiny_llama, "run", changes, steps=steps), allow_config_change=True)
    assert_same(folder, in_process)


def test_conversations_have_the_same_numbers(address: str, tmp_path: Path, tiny_llama: Path) -> None:
    """Turns of episodes are requests that come while others are sampled, in two workers."""
    game = {
        "data": {"train_files": []},
        "reward": {"terms": []},
        "environment": {
            "name": "guess_number",
            "settings": {"low": 1, "high": 4},
            "max_turns": 3,
            "train_episodes": 8,
            "validation_episodes": 1,
            "workers": 0,
        },
    }
    alone = train_run(config(tmp_path, tiny_llama, "alone", game))
    two = game | SHARDED | {"placement": SHARDED["placement"] | _ray(address)}
    assert_same(train_run(config(tmp_path, tiny_llama, "run", two)), alone)


def _ray(address: str) -> dict[str, Any]:
    return {"runtime": "ray", "ray_address": address}
