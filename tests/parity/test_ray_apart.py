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
from ray_runs import config, lines_of
from test_async_runs import RAGGED, assert_each_group_is_trained_once, events

from posttrain.build.train import train_run

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

APART: dict[str, dict[str, Any]] = {
    "asynchronous": {"mode": "separate", "max_staleness_steps": 2},
    "policy": {"devices": [0]},
    "reference": {"devices": [0]},
    "rollout": RAGGED | {"devices": [1, 2], "samples_per_prompt": 4, "max_response_tokens": 48},
    "loss": {"kl_coef": 0.01, "rollout_correction": {"weights": "token"}},
    "data": {"validation_files": []},
}


def test_a_sampler_that_is_killed_gives_its_groups_away(address: str, tmp_path: Path, tiny_llama: Path) -> None:
    """I12, I15: every group is trained once, by true versions; the killed sampler joins again with later weights; the replay of
    the run, with no sampler killed, has the same weights."""
    asked = config(
        tmp_path,
        tiny_llama,
        "run",
        APART | {"placement": {"devices": 3, "ray_address": address, "runtime": "ray"}},
        steps=14,
    )
    folder = Path(asked.folder)
    killer = threading.Thread(target=kill_after, args=(folder, "rollout rank 1", 3))
    killer.start()
    train_run(asked)
    killer.join()
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
        span["version"]
        for step in range(1, 15)
        for line in (folder / f"samples/step_{step}.jsonl").read_text().splitlines()
        for span in json.loads(line).get("version_spans") or [{"version": json.loads(line)["policy_version"]}]
    }
    assert versions <= set(echoed)


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
