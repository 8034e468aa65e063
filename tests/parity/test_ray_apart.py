"""Samplers that work apart in workers of Ray: a trainer and two samplers, of which one is killed."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ray_runs import config, count_reads, lines_of
from test_async_runs import RAGGED, WORLD, assert_each_group_is_trained_once, events

from posttrain.build.train import train_run
from posttrain.config import RunConfig

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

APART: dict[str, dict[str, Any]] = {
    "asynchronous": {"mode": "separate", "max_staleness_steps": 2},
    "policy": {"devices": [0]},
    "reference": {"devices": [0]},
    "rollout": RAGGED | {"devices": [1, 2], "samples_per_prompt": 4, "max_response_tokens": 48},
    "loss": {"kl_coef": 0.01, "rollout_correction": {"weights": "token"}},
    "data": {"train_files": [], "validation_files": []},
    "reward": {"terms": [], "timeout_s": 300.0},
    "validation": {"before_training": False, "after_training": False},
}
STEPS = 14


def test_a_sampler_that_is_killed_gives_its_groups_away(address: str, tmp_path: Path, tiny_llama: Path) -> None:
    """I5, I12, I15: every episode is trained once, by true versions; the replay of the run, in which no sampler is killed and
    environments answer at once, has the same samples and weights."""
    (tmp_path / "world.py").write_text(WORLD)

    def run(name: str, seconds: float) -> RunConfig:
        world = {"name": f"{tmp_path}/world.py:Guess", "train_episodes": 10, "validation_episodes": 2, "workers": 24}
        more = {
            "environment": world | {"settings": {"seconds": seconds}},
            "placement": {"devices": 3, "ray_address": address, "runtime": "ray"},
        }
        return config(tmp_path, tiny_llama, name, APART | more, steps=STEPS)

    asked = run("run", 0.03)
    folder = Path(asked.folder)
    killer = threading.Thread(target=kill_after, args=(folder, "rollout rank 1", 3))
    killer.start()
    train_run(asked)
    killer.join()
    assert made_by(train_run(run("again", 0.0), replay=folder)) == made_by(folder)
    log = events(folder)
    assert_each_group_is_trained_once(folder)
    assert [event["sampler"] for event in log if event["event"] == "lost"] == [1]
    assert max(line["async/staleness_steps_max"] for line in lines_of(folder)) <= 2
    echoed: dict[int, list[str]] = {}
    for event in log:
        if event["event"] == "weights":
            echoed.setdefault(event["version"], []).append(event["hash"])
    assert all(len(set(hashes)) == 1 for hashes in echoed.values())
    versions = {
        turn["policy_version"]
        for step in range(1, STEPS + 1)
        for line in (folder / f"samples/step_{step}.jsonl").read_text().splitlines()
        for turn in json.loads(line)["turns"]
    }
    assert len(versions) > 1 and versions <= set(echoed)


def made_by(folder: Path) -> dict[str, bytes]:
    """The samples of every step and the last weights, by path."""
    paths = [*folder.glob("samples/step_*.jsonl"), folder / f"checkpoints/global_step_{STEPS}/policy/model.safetensors"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def kill_after(folder: Path, name: str, step: int) -> None:
    """Kill a worker when so many steps are over."""
    until = time.monotonic() + 120
    metrics = folder / "metrics.jsonl"
    while time.monotonic() < until:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= step:
            break
        time.sleep(0.05)
    found = json.loads((folder / "workers/workers.json").read_text())[name]
    os.kill(found["pid"], signal.SIGKILL)


def test_the_driver_looks_into_no_response(
    address: str, tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and log-probs go from the samplers to the trainer, and those of a killed one to the other."""
    more: dict[str, dict[str, Any]] = {
        "placement": {"devices": 3, "ray_address": address, "runtime": "ray"},
        "checkpoint": {"every_steps": None, "at_end": False},
    }
    kept = {name: section for name, section in APART.items() if name not in ("data", "reward", "validation")}
    asked = config(tmp_path, tiny_llama, "unread", kept | more, steps=6)
    reads = count_reads(monkeypatch)
    killer = threading.Thread(target=kill_after, args=(Path(asked.folder), "rollout rank 1", 2))
    killer.start()
    folder = train_run(asked)
    killer.join()
    assert_each_group_is_trained_once(folder)
    assert [event["sampler"] for event in events(folder) if event["event"] == "lost"] == [1]
    assert reads == []
