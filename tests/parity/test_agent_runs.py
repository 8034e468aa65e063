"""Runs whose trajectories come from agents: one with the official OpenAI client, and agents that break."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.build.train import train_run
from posttrain.config import RunConfig
from posttrain.dialects.detect import read_config

EXAMPLES = Path(__file__).parents[2] / "examples"

BREAKS = '''
import json, os, time, urllib.request

def ask(episode, messages):
    headers = {"Authorization": "Bearer " + episode.api_key}
    request = urllib.request.Request(episode.base_url + "/chat/completions", json.dumps({"messages": messages}).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]

def play(episode):
    """Breaks in the way that its seed says; asks twice, and the second time with another history."""
    said = ask(episode, [{"role": "user", "content": "go"}])
    how = ["well", "hang", "well", "crash", "well", "raise", "well", "nonsense"][episode.seed % 8]
    if how == "hang":
        time.sleep(600)
    if how == "crash":
        os.abort()
    if how == "raise":
        raise RuntimeError("broken")
    ask(episode, [{"role": "user", "content": "Shorter: " + said["content"][:3]}])
    return "nonsense" if how == "nonsense" else float(len(said["content"]))
'''


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def samples_of(folder: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"samples/step_{step}.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_official_client(tiny_llama: Path, tmp_path: Path) -> None:
    """examples/grpo_agent.yaml, two steps of it."""
    pytest.importorskip("openai")
    ours = {
        "model.path": tiny_llama,
        "model.compute_dtype": "float32",
        "run.folder": tmp_path / "run",
        "run.total_steps": 2,
        "data.prompts_per_step": 2,
        "environment.settings.function": f"{EXAMPLES}/agent_guess_number.py:play",
        "environment.train_episodes": 4,
        "environment.validation_episodes": 2,
        "environment.workers": 2,
        "rollout.samples_per_prompt": 2,
        "policy.sequences_per_mini_batch": 4,
        "policy.sequences_per_micro_batch_per_device": 4,
        "placement.cpu_threads": 1,
        "validation.every_steps": "null",
    }
    loaded = read_config(str(EXAMPLES / "grpo_agent.yaml"), [f"{key}={value}" for key, value in ours.items()], "native")
    assert not loaded.problems and not loaded.warnings
    folder = train_run(loaded.config)
    last = metrics_of(folder)[-1]
    assert last["reward/invalid_share"] == 0 and last["gap/max"] < 1e-3
    samples = samples_of(folder, 2)
    assert max(len(sample["turns"]) for sample in samples) > 1
    for sample in samples:
        assert sample["environment"]["metrics"]["guesses"] == len(sample["turns"]) <= 5
        assert {turn["sample"] for turn in sample["turns"]} == {0}  # every request went on behind the last


def test_broken_agents_cost_their_own_episodes(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text(BREAKS)
    config = RunConfig.model_validate(
        {
            "model": {"path": str(tiny_llama), "compute_dtype": "float32"},
            "run": {"folder": str(tmp_path / "run"), "total_steps": 1},
            "data": {"train_files": [], "prompts_per_step": 8, "shuffle": False},
            "rollout": {"samples_per_prompt": 2, "max_response_tokens": 6},
            "policy": {"sequences_per_mini_batch": 16},
            "placement": {"cpu_threads": 1},
            "environment": {
                "name": "agent",
                "settings": {"function": f"{tmp_path}/agents.py:play"},
                "train_episodes": 8,
                "workers": 4,
                "timeout_s": 1.0,
            },
        }
    )
    (line,) = metrics_of(train_run(config))
    # of 8 beginnings four break, with 2 samples each of 16; two of the four are exceptions of the agent's
    assert line["reward/invalid/env_timeout"] == pytest.approx(2 / 16)
    assert line["reward/invalid/env_crashed"] == pytest.approx(6 / 16)
    assert line["policy/skipped_updates"] == 0 and line["gap/max"] < 1e-3
    samples = samples_of(tmp_path / "run", 1)
    assert [sample["invalid"] is None for sample in samples] == [True, True, False, False] * 4
    whole = [sample for sample in samples if sample["invalid"] is None]
    assert all(len(sample["turns"]) == 2 for sample in whole)
    assert all(sample["reward"] == len(sample["turns"][0]["text"]) for sample in whole)
    assert line["episode/samples_mean"] > 1  # a history of its own begins a training sample of its own
