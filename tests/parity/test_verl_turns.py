"""verl's override list for several turns with a tool, two steps of it on a tiny model."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from posttrain.build.train import train_run
from posttrain.dialects.detect import read_config

EXAMPLES = Path(__file__).parents[2] / "examples"
TURNS = "actor_rollout_ref.rollout.multi_turn"
TALK = f"{TURNS}.interaction_config_path={EXAMPLES}/verl_tools/gsm8k_interaction.yaml"
TOOL = f"{TURNS}.tool_config_path={EXAMPLES}/verl_tools/gsm8k_tool.yaml"
AGENTS = ["actor_rollout_ref.rollout.mode=async", f"{TURNS}.enable=False"]


def overrides_of(script: Path) -> list[str]:
    """The words behind --dialect verl."""
    words = shlex.split(script.read_text().replace("\\\n", " "), comments=True)
    return [os.path.expandvars(word) for word in words[words.index("verl") + 1 :] if word != "$@"]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """As verl's preparation script writes them, with an interaction; every other row names the agent with tools."""
    file = tmp_path / "train.jsonl"
    lines = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What is {number} + 1?"}],
            "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
            "extra_info": {
                "index": number,
                "need_tools_kwargs": True,
                "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": str(number + 1)}}},
                "interaction_kwargs": {"name": "gsm8k", "ground_truth": str(number + 1)},
            },
            "agent_name": "tool_agent" if number % 2 else "single_turn_agent",
        }
        for number in range(4)
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return file


@pytest.mark.parametrize("changes", [[], pytest.param(AGENTS, marks=pytest.mark.slow)])
def test_two_steps(changes: list[str], rows: Path, tiny_llama: Path, tmp_path: Path) -> None:
    ours: dict[str, Any] = {
        "data.train_files": rows,
        "data.val_files": rows,
        "data.train_batch_size": 4,
        "data.max_prompt_length": 200,
        "data.max_response_length": 160,
        "actor_rollout_ref.model.path": tiny_llama,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.rollout.n": 2,
        "trainer.total_training_steps": 2,
        "trainer.default_local_dir": tmp_path / "run",
        "+posttrain.environment.workers": 2,
        "+posttrain.placement.cpu_threads": 1,
        "+posttrain.model.compute_dtype": "float32",
        f"{TURNS}.max_assistant_turns": 3,
        "+actor_rollout_ref.rollout.stop": "[a,e,o]",  # so that gibberish has short turns
    }
    words = [*overrides_of(EXAMPLES / "verl_gsm8k_tool.sh"), *(f"{key}={value}" for key, value in ours.items())]
    loaded = read_config(None, [*words, TALK, TOOL, *changes], "verl")
    assert not loaded.problems and not loaded.unsupported, [*map(str, loaded.problems), *map(str, loaded.unsupported)]
    folder = train_run(loaded.config)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = metrics[-1]
    assert last["step"] == 2 and "policy/loss" in last
    assert last["reward/invalid_share"] == 0
    assert last["gap/max"] < 1e-3  # nats: what was sampled is what is trained, also behind the other side's words
    samples = [json.loads(line) for line in (folder / "samples/step_2.jsonl").read_text().splitlines()]
    assert len(samples) == 4 * 2
    talks = [sample for sample in samples if len(sample["turns"]) > 1]
    # Gibberish is never right, so every talk is sent back until 3 turns, or all 160 tokens, are used up; single turns are not.
    assert len(talks) >= 1 and all("incorrect" in sample["turns"][0]["observation"] for sample in talks)
    assert all(sample["response_tokens"] <= 160 for sample in samples)
    if changes:
        assert {sample["prompt_id"][-1] for sample in talks} <= {"1", "3"}
