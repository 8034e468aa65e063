"""A run on a tiny model that takes seconds, and what of a run folder must be the same whatever happened on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from posttrain.config import RunConfig

REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return sum(solution_str.encode()) % 5 / 4
"""

PPO: dict[str, dict[str, Any]] = {
    "advantage": {"name": "gae", "gae_lambda": 0.9},
    "critic": {"optimizer": {"lr": 3e-3}, "sequences_per_mini_batch": 2, "warmup_steps": 2},
    "reward": {"normalize_mean": "running", "kl": {"coef": 0.01, "target": 0.1, "horizon_sequences": 100}},
}


def tiny_run(folder: Path, model: Path, name: str, /, *, steps: int, **changes: dict[str, Any]) -> RunConfig:
    """A configuration of ``steps`` steps of two prompts x three samples, five steps an epoch, saved every second one."""
    (folder / "reward.py").write_text(REWARD)
    rows = [{"data_source": "sums", "prompt": f"{n}+{n}=", "reward_model": {"ground_truth": "x"}} for n in range(10)]
    for file in ("train", "validation"):
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections: dict[str, dict[str, Any]] = {
        "run": {"total_steps": steps, "folder": str(folder / name)},
        "model": {"path": str(model), "compute_dtype": "float32"},
        "data": {
            "train_files": [str(folder / "train.jsonl")],
            "validation_files": [str(folder / "validation.jsonl")],
            "prompts_per_step": 2,
        },
        "rollout": {"samples_per_prompt": 3, "max_response_tokens": 6},
        "reward": {"terms": [{"name": "score", "path": str(folder / "reward.py")}]},
        "loss": {"kl_coef": 0.01},
        "policy": {
            "sequences_per_mini_batch": 3,
            "sequences_per_micro_batch_per_device": 2,
            "optimizer": {"lr": 1e-3},
            "schedule": {"name": "cosine", "warmup_updates": 2},
        },
        "validation": {"every_steps": 3, "max_prompts": 2},
        "checkpoint": {"every_steps": 2, "keep_last": 2},
        "tracking": {"trackers": []},
        "placement": {"device": "cpu", "cpu_threads": 1},
    }
    merged = {name: sections.get(name, {}) | changes.get(name, {}) for name in {**sections, **changes}}
    return RunConfig.model_validate(merged)


def result(folder: Path) -> dict[str, bytes]:
    """metrics.jsonl without times and speeds, the samples, and the files of every checkpoint, by path."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if not k.startswith(("time/", "speed/"))} for line in lines]
    found = {"metrics": "\n".join(json.dumps(line, sort_keys=True) for line in kept).encode()}
    for part in ("samples", "validation", "checkpoints"):
        paths = sorted(path for path in (folder / part).rglob("*") if path.is_file())
        # owner.json says who the run is, not what it computed
        found |= {str(path.relative_to(folder)): path.read_bytes() for path in paths if path.name != "owner.json"}
    return found
