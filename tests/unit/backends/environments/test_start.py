"""From the configuration and a row to an environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.backends.environments.inline import InlineHost
from posttrain.backends.environments.processes import ProcessHost
from posttrain.backends.environments.start import spec_of, start_worlds
from posttrain.config import RunConfig
from posttrain.data.turns import OneMessageTurns, TemplateTurns
from posttrain.errors import ConfigError, DataError
from posttrain.models.tiny import tiny_tokenizer
from posttrain.records.prompts import Prompt


def a_run(**environment: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train_files": ["a"]},
            "rollout": {"max_response_tokens": 100},
            "validation": {"max_response_tokens": 150},
            "environment": environment,
        }
    )


def a_prompt(**extra: Any) -> Prompt:
    return Prompt(prompt_id="f:0", token_ids=(1,), text="", data_source="src", ground_truth="72", extra_info=extra)


def test_rules_and_parts() -> None:
    config = a_run(
        name="single_turn",
        max_turns=4,
        workers=2,
        max_trajectory_tokens=300,
        sample_per_turn=True,
        reward_of="last_turn",
    )
    worlds = start_worlds(config, tiny_tokenizer(), 1000.0, [a_prompt()])
    assert isinstance(worlds.host, ProcessHost) and isinstance(worlds.writer, TemplateTurns)
    worlds.host.close()
    rules = worlds.rules
    assert rules.max_context_tokens == 1000 - 150  # the longest turn fits behind it
    assert (rules.max_turns, rules.max_trajectory_tokens, rules.sample_per_turn) == (4, 300, True)
    assert rules.reward_of == "last_turn"
    decides = a_run(name="single_turn", max_turns=4, end_at_max_turns=False, workers=0, conversation="one_message")
    worlds = start_worlds(decides, tiny_tokenizer(), 1000.0, [])
    assert isinstance(worlds.host, InlineHost) and isinstance(worlds.writer, OneMessageTurns)
    assert worlds.rules.max_turns is None and worlds.spec_of(a_prompt()).max_turns == 4


def test_a_context_that_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="a context of up to 900 tokens and a turn of up to 150"):
        start_worlds(a_run(name="single_turn", max_context_tokens=900), tiny_tokenizer(), 1000.0, [])


NAMED = {"maze": {"name": "m:Maze", "settings": {"size": 3}, "max_turns": 2}}


def test_a_row_of_an_open_run_names_the_environment_that_scores_it() -> None:
    judge = {**NAMED, "judge": {"name": "m:Judge"}}
    environment = a_run(name="open", settings={"scored_by": "judge"}, named=judge).environment
    assert spec_of(environment, a_prompt(env_class="maze")).name == "m:Maze"
    assert spec_of(environment, a_prompt()).name == "m:Judge"
    assert spec_of(a_run(name="open", named=judge).environment, a_prompt()).name == "open"  # a call gives its reward


def test_rows_name_their_environment() -> None:
    environment = a_run(name="single_turn", max_turns=4, named=NAMED).environment
    named = spec_of(environment, a_prompt(env_class="maze"))
    assert (named.name, named.settings, named.max_turns) == ("m:Maze", {"size": 3}, 2)
    assert named.row == {"env_class": "maze", "data_source": "src", "ground_truth": "72"}
    assert spec_of(environment, a_prompt()).name == "single_turn"
    alone = a_run(name="skyrl_gym").environment  # without named ones the column is the environment's own
    assert spec_of(alone, a_prompt(env_class="gsm8k")).name == "skyrl_gym"


def test_rows_that_name_none() -> None:
    with pytest.raises(DataError, match="f:0 names 'lake'"):
        start_worlds(a_run(name="single_turn", named=NAMED), tiny_tokenizer(), 1000.0, [a_prompt(env_class="lake")])
    with pytest.raises(DataError, match="f:0 names none in column env_class"):
        start_worlds(a_run(named=NAMED), tiny_tokenizer(), 1000.0, [a_prompt()])


def test_the_users_own_code_and_keys_are_found_in_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are imported once, and their keys passed on; a built-in tool is neither."""
    monkeypatch.chdir(tmp_path)
    for module, name in (("agent", "play"), ("maze", "Maze"), ("my_tools", "weather"), ("talks", "Quiz")):
        (tmp_path / f"{module}.py").write_text(f"class {name}: ...\n")
    monkeypatch.setenv("MCP_KEY", "secret")
    monkeypatch.setenv("OTHER_KEY", "secret")
    tools = ["calculator", {"name": "my_tools.py:weather"}, {"name": "mcp", "url": "u", "token_env": "MCP_KEY"}]
    talks = [{"name": "quiz", "class_name": "talks.py:Quiz"}]
    named = {
        "shop": {"name": "tools", "settings": {"tools": tools}},
        "talk": {"name": "interaction", "settings": {"interactions": talks}},
        "own": {"name": "maze.py:Maze", "settings": {"map": "a:b"}},
    }
    config = a_run(name="agent", settings={"function": "agent.py:play"}, named=named, workers=2)
    host = start_worlds(config, tiny_tokenizer(), 1000.0, []).host
    assert isinstance(host, ProcessHost)
    host.close()
    server = host._server
    assert server._setup["own"] == ["agent.py:play", "maze.py:Maze", "my_tools.py:weather", "talks.py:Quiz"]
    assert server._setup["names"] == ["agent", "interaction", "tools"]
    assert server._variables["MCP_KEY"] == "secret" and "OTHER_KEY" not in server._variables


def test_an_environment_that_cannot_be_imported_ends_the_start(tmp_path: Path) -> None:
    file = tmp_path / "worlds.py"
    file.write_text("import no_such_library\n")
    config = a_run(named={"maze": {"name": f"{file}:Maze"}}, workers=0)
    with pytest.raises(ConfigError, match="cannot be loaded: ModuleNotFoundError: No module named 'no_such") as raised:
        start_worlds(config, tiny_tokenizer(), 1000.0, [a_prompt(env_class="maze")])
    assert raised.value.problems[0].field == "environment.named.maze.name"
