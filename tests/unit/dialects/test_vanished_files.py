"""Files of verl's keys that are gone, and rows that name an agent which is not there: one problem each, by verl's key."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest

from posttrain.cli.plan import PLANS
from posttrain.cli.request import load_request
from posttrain.errors import RequestError

AGENT, TURNS = "actor_rollout_ref.rollout.agent", "actor_rollout_ref.rollout.multi_turn"
LOOPS = f"{AGENT}.agent_loop_config_path"
TOOLS = """tools:
  - class_name: verl.tools.gsm8k_tool.Gsm8kTool
    config: {type: native}
"""


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_llama: Path) -> list[str]:
    monkeypatch.chdir(tmp_path)
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "hi"}],
        "reward_model": {"ground_truth": "1"},
    }
    rows = [row | {"agent_name": name} for name in ("react", "tool_agent")]
    Path("rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    Path("tools.yaml").write_text(TOOLS)
    return [
        "data.train_files=rows.jsonl",
        "data.val_files=null",
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.mode=async",
        "actor_rollout_ref.rollout.n=4",
        f"actor_rollout_ref.model.path={tiny_llama}",
        "algorithm.adv_estimator=grpo",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
    ]


def said(words: list[str]) -> list[str]:
    try:
        loaded = load_request(words, "verl", here=True)
        import_module(PLANS[loaded.entry]).check_request(loaded, look_at_files=True)
    except RequestError as error:
        return [str(problem) for problem in error.problems]
    return []


@pytest.mark.parametrize(
    "given",
    [
        (f"+{LOOPS}=gone.yaml",),
        (f"+{LOOPS}=gone.yaml", f"+{AGENT}.default_agent_loop=react"),
        (f"{TURNS}.tool_config_path=gone.yaml", f"{TURNS}.enable=True"),
        (f"{TURNS}.interaction_config_path=gone.yaml", f"{TURNS}.enable=True"),
    ],
)
def test_nothing_follows_from_a_file_that_is_gone(words: list[str], given: tuple[str, ...]) -> None:
    assert said([*words, *given]) == [f"gone.yaml cannot be read: No such file or directory, at override {given[0]}"]


@pytest.mark.parametrize("other", [(), (f"{TURNS}.tool_config_path=tools.yaml",)])
def test_a_file_of_functions_is_named_by_its_key(words: list[str], other: tuple[str, ...]) -> None:
    functions = f"+{TURNS}.function_tool_path=gone.py"
    assert f"there is no file gone.py, at override {functions}" in said([*words, functions, *other])


def test_an_agent_that_is_not_there_is_to_be_listed_in_verls_file(words: list[str]) -> None:
    [problem] = said([*words, f"{TURNS}.tool_config_path=tools.yaml"])
    assert problem == (
        "rows.jsonl has rows for the environment 'react', which is not there (named: single_turn_agent, tool_agent), at "
        f"{LOOPS} (a default; the command line does not set it); add it to {LOOPS}"
    )
