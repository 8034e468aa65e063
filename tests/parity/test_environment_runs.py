"""Runs in environments: a task of one turn is the same run with and without, and broken worlds cost their own episodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.build.train import train_run
from posttrain.config import RunConfig

WORLDS = '''
import os, time
from posttrain.interfaces.env import EnvStart, EnvStep

class Fragile:
    """Breaks in the way that its seed says; every other seed is well."""

    def __init__(self, spec):
        self.turn = 0

    def reset(self, seed):
        self.how = ["well", "hang", "well", "crash", "well", "raise", "well", "nonsense"][seed % 8]
        return EnvStart(messages=[{"role": "user", "content": "go"}])

    def step(self, action):
        self.turn += 1
        if self.turn == 2:
            if self.how == "hang":
                time.sleep(600)
            if self.how == "crash":
                os.abort()
            if self.how == "raise":
                raise RuntimeError("broken")
            if self.how == "nonsense":
                return {"observations": []}
        return EnvStep(messages=[{"role": "user", "content": "on"}], reward=float(len(action)), done=self.turn == 2)

    def close(self):
        return {}
'''


def metrics_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def a_run(model: Path, folder: Path, **sections: dict[str, Any]) -> RunConfig:
    values: dict[str, Any] = {
        "model": {"path": str(model), "compute_dtype": "float32"},
        "run": {"folder": str(folder), "total_steps": 2},
        "rollout": {"samples_per_prompt": 2, "max_response_tokens": 6},
        "placement": {"cpu_threads": 1},
        "reward": {},
    }
    return RunConfig.model_validate({**values, **sections})


def test_one_turn_in_an_environment_is_a_response(tiny_llama: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"What is {n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(4)))
    data = {"train_files": [str(rows)], "prompts_per_step": 2}
    reward = {"terms": [{"name": "length", "options": {"max_characters": 1, "ramp_characters": 10}}]}
    policy = {"sequences_per_mini_batch": 4}
    found = []
    for name, environment in (("with", {"name": "single_turn", "workers": 0}), ("without", {})):
        config = a_run(tiny_llama, tmp_path / name, data=data, reward=reward, policy=policy, environment=environment)
        lines = metrics_of(train_run(config))
        wanted = ("reward/", "policy/", "response/", "gap/", "advantage/")
        found.append([{key: value for key, value in line.items() if key.startswith(wanted)} for line in lines])
    assert found[0] == found[1] and found[0][-1]["advantage/abs_mean"] > 0


def test_broken_worlds_cost_their_own_episodes(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "worlds.py").write_text(WORLDS)
    environment = {"name": f"{tmp_path}/worlds.py:Fragile", "train_episodes": 8, "workers": 4, "timeout_s": 1.0}
    config = a_run(
        tiny_llama,
        tmp_path / "run",
        data={"train_files": [], "prompts_per_step": 8, "shuffle": False},
        run={"folder": str(tmp_path / "run"), "total_steps": 1},
        policy={"sequences_per_mini_batch": 16},
        environment=environment,
    )
    (line,) = metrics_of(train_run(config))
    # of 8 beginnings, with seeds from 1,000,000 (0 modulo 8) on, four break: 2 samples each of 16
    assert line["reward/invalid_share"] == 0.5
    assert line["reward/invalid/env_timeout"] == pytest.approx(2 / 16)
    assert line["reward/invalid/env_crashed"] == pytest.approx(4 / 16)  # the process that ended, and the exception
    assert line["reward/invalid/env_invalid"] == pytest.approx(2 / 16)
    assert line["policy/skipped_updates"] == 0
    samples = [json.loads(text) for text in (tmp_path / "run/samples/step_1.jsonl").read_text().splitlines()]
    assert [sample["invalid"] is None for sample in samples] == [True, True, False, False] * 4
    assert all(len(sample["turns"]) == 2 for sample in samples)
