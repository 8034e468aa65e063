"""Tuning on several devices has the numbers of a run in one process: losses, gradient norms, rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.build.tune import tune_run
from posttrain.config.tune import TuneConfig
from posttrain.models.tiny import write_tiny_model
from posttrain.registry import is_installed

pytest.importorskip("ray")
pytestmark = pytest.mark.slow


DEEPSPEED = pytest.mark.skipif(not is_installed("deepspeed"), reason="needs deepspeed")


@pytest.mark.parametrize(
    ("method", "engine", "how"),
    [
        ("dpo", "fsdp", {}),
        ("dpo", "fsdp", {"precompute": True}),  # the workers' reference scores all rows before the first step
        ("reward_model", "fsdp", {}),
        # The reference is the policy without its adapter, whose weights DeepSpeed gathers for both
        pytest.param("dpo", "deepspeed", {"lora": {"rank": 4}}, marks=DEEPSPEED),
        pytest.param("kto", "deepspeed", {}, marks=DEEPSPEED),
    ],
)
def test_two_ranks_have_the_numbers_of_one_process(
    tmp_path: Path, method: str, engine: str, how: dict[str, Any]
) -> None:
    model = write_tiny_model(tmp_path / "model")
    pairs = [{"prompt": f"say {n}", "chosen": f"{n}! " * (n % 3 + 1), "rejected": f"no {n}"} for n in range(8)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))

    def run(name: str, engine: str, devices: int) -> list[dict[str, Any]]:
        config = TuneConfig.model_validate(
            {
                "model": {"path": str(model), "compute_dtype": "float32"},
                "data": {"train_files": [str(tmp_path / "pairs.jsonl")], "sequences_per_step": 8, "max_tokens": 128},
                "method": {"name": method},
                "reference": {"precompute": how.get("precompute", False) and devices > 1},
                "run": {"folder": str(tmp_path / name), "total_steps": 2},
                "policy": {
                    "engine": engine,
                    "optimizer": {"lr": 1e-3},
                    "sequences_per_micro_batch_per_device": 2,
                    "lora": how.get("lora"),
                },
                "tracking": {"trackers": []},
                "placement": {"device": "cpu", "cpu_threads": 1, "devices": devices},
            }
        )
        lines = (tune_run(config) / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    for mine, theirs in zip(run("one", "local", 1), run("two", engine, 2), strict=True):
        compared = {name for name in mine if name.startswith(("policy/", "rewards/", "logps/"))}
        assert {"policy/loss", "policy/grad_norm", "rewards/chosen"} <= compared <= theirs.keys()
        for name in compared:
            assert theirs[name] == pytest.approx(mine[name], rel=1e-4, abs=1e-6), name
