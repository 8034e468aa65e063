"""A model that the run serves for reward functions: in one process, and in workers of Ray with several copies.

The server is the stand-in of ``test_ray_servers``; the function asks it by HTTP, as verl's functions do.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from ray_runs import config, metrics_of

from posttrain.build.train import train_run
from posttrain.config import RunConfig
from posttrain.plan.checks.train import check
from warm.processes import warm_python

pytestmark = pytest.mark.slow

STAND_IN = Path(__file__).with_name("vllm_stand_in.py")
# A word of the judge for the first bytes of the response, greedily: its first token's number
ASKS = """
import json, urllib.request
def verdict(solution_str, ground_truth, reward_router_address, reward_model_tokenizer):
    ids = [1 + byte % 250 for byte in solution_str.encode()[:4]] or [1]
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0.0, "top_p": 1.0, "seed": 0, "return_token_ids": True}
    asked = urllib.request.Request(f"http://{reward_router_address}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(asked, timeout=30) as answer:
        [choice] = json.load(answer)["choices"]
    return choice["token_ids"][0] % 7 / 6
"""


def judged(folder: Path, model: Path, name: str, told: Path, changes: dict[str, dict[str, Any]]) -> RunConfig:
    """A run whose judge is the policy's starting model."""
    (folder / "asks.py").write_text(ASKS)
    (python := folder / "python").write_text(f'#!/bin/sh\nexec {warm_python()} {STAND_IN} {told} "$@"\n')
    python.chmod(0o755)
    term = {"name": "verdict", "path": str(folder / "asks.py"), "judge_tokenizer": str(model)}
    served = {"path": str(model), "max_tokens": 64, "engine_options": {"python": str(python)}} | changes.pop(
        "served", {}
    )
    reward = {"terms": [term], "served": served, "timeout_s": 60.0}
    made = config(folder, model, name, changes | {"reward": reward}, steps=2)
    assert check(made) == []
    return made


def ended(told: Path, count: int) -> list[dict[str, Any]]:
    until = time.monotonic() + 30
    while len(list(told.glob("*.json"))) < count and time.monotonic() < until:
        time.sleep(0.1)  # they end after their workers
    found = [json.loads(path.read_text()) for path in told.glob("*.json")]
    assert len(found) == count
    return found


def test_copies_of_a_judge_give_the_rewards_of_one(address: str, tmp_path: Path, tiny_llama: Path) -> None:
    told = [tmp_path / "one", tmp_path / "two"]
    for each in told:
        each.mkdir()
    alone = train_run(judged(tmp_path, tiny_llama, "alone", told[0], {}))
    lines = metrics_of(alone)
    assert any(line["reward/mean"] > 0 for line in lines) and not any(
        name.startswith("reward/invalid/") for name in lines[0]
    )
    [server] = ended(told[0], 1)
    assert len(server["prompts"]) == 16  # 2 steps of 2 x 4 responses
    words = server["words"]
    assert words[words.index("--served-model-name") + 1] == str(tiny_llama)
    apart: dict[str, dict[str, Any]] = {
        "policy": {"engine": "fsdp", "devices": [0, 1]},
        "reference": {"devices": [0, 1]},
        "rollout": {"devices": [0, 1]},
        "served": {"devices": [2, 3]},
        "placement": {"devices": 4, "runtime": "ray", "ray_address": address},
    }
    found = metrics_of(train_run(judged(tmp_path, tiny_llama, "apart", told[1], apart)))
    for mine, theirs in zip(found, lines, strict=True):
        assert mine["reward/mean"] == pytest.approx(theirs["reward/mean"], abs=1e-6)
        assert mine["policy/loss"] == pytest.approx(theirs["policy/loss"], rel=1e-4, abs=1e-6)
    servers = ended(told[1], 2)
    assert sum(len(each["prompts"]) for each in servers) == 16 and all(each["prompts"] for each in servers)
