"""A run of two steps on a tiny model, and how runs are compared."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from posttrain.config import RunConfig

REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return sum(solution_str.encode()) % 5 / 4
"""


def config(folder: Path, model: Path, name: str, changes: dict[str, dict[str, Any]], *, steps: int = 3) -> RunConfig:
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


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have every look of the driver into an array of responses, or of their numbers, noted by its bytes."""
    from posttrain.backends.runtime.ray.cluster import RayArray

    read, found = RayArray.read, list[int]()

    def noted(array: RayArray) -> Any:
        found.append(read(array).nbytes)
        return read(array)

    monkeypatch.setattr(RayArray, "read", noted)
    return found


def lines_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def metrics_of(folder: Path) -> list[dict[str, float]]:
    lines = lines_of(folder)
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "speed/", "memory/"))} for line in lines]


def assert_same(
    found: Path,
    expected: Path,
    *,
    roles: Sequence[str] = ("policy",),
    files: Sequence[str] = ("model", "optimizer"),
    weights_to: float = 1e-6,
    leaving: Sequence[str] = (),
) -> None:
    """The metrics but for those to leave out, and the weights and averages of the last checkpoint, to 1e-5 of their size or
    ``weights_to``."""
    for here, there in zip(metrics_of(found), metrics_of(expected), strict=True):
        assert here.keys() == there.keys()
        for name, value in there.items():
            if name in leaving:
                continue
            # The gap between sampler and trainer is nothing but the rounding of log-probs.
            small = 1e-5 if name.startswith("gap/") else 1e-6
            assert math.isclose(here[name], value, rel_tol=1e-5, abs_tol=small), f"{name}: {here[name]}, not {value}"
    newest = (expected / "checkpoints/latest").read_text().strip()
    for name in (f"{role}/{kind}.safetensors" for role in roles for kind in files):
        path = f"checkpoints/{newest}/{name}"
        mine, theirs = load_file(found / path), load_file(expected / path)
        assert mine.keys() == theirs.keys()
        for key, tensor in theirs.items():
            torch.testing.assert_close(
                mine[key], tensor, rtol=1e-5, atol=weights_to, msg=lambda text, key=key: f"{key}: {text}"
            )
