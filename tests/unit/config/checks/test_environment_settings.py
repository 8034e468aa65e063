"""Settings of registered environments are known before a run."""

from __future__ import annotations

from typing import Any

from posttrain.config import RunConfig
from posttrain.config.checks.environment import environment_problems
from posttrain.registry import ENVS


def said(**environment: Any) -> list[str]:
    values = {"model": {"path": "m"}, "data": {"train_files": ["f"]}, "environment": environment}
    return [str(problem) for problem in environment_problems(RunConfig.model_validate(values))]


def test_a_misspelt_setting_is_found() -> None:
    assert said(name="guess_number", settings={"low": 2, "template": "{observation}"}) == []
    [problem] = said(name="guess_number", settings={"lwo": 2})
    assert (
        problem.startswith("the environment guess_number has no setting 'lwo' (known: low, high, ")
        and "mean low?" in problem
    )
    [problem] = said(named={"a": {"name": "single_turn", "settings": {"x": 1}}})
    assert problem.startswith("the environment single_turn has no setting 'x' (known: none)")
    assert said(name="mine.py:Env", settings={"anything": 1}) == []


def test_a_weight_is_needed() -> None:
    named = {"a": {"name": "sokoban", "weight": 0}}
    problems = said(named=named, train_episodes=4)
    assert any("has a weight above 0 in environment.train_episodes" in text for text in problems)


def test_a_text_game_takes_the_wording_that_all_text_games_share() -> None:
    takers = [name for name in ENVS.names() if ENVS.describe(name).takes_more]
    assert {"frozen_lake", "sokoban"} <= set(takers)
    for name in takers:
        assert not [text for text in said(name=name, settings={"system": "x"}) if "no setting" in text]
    [problem] = said(name="single_turn", settings={"system": "x"})
    assert "has no setting 'system'" in problem


def test_values_of_another_type_and_missing_settings_are_found() -> None:
    [problem] = said(name="guess_number", settings={"high": "many"})
    assert problem.startswith(
        "the setting high of the environment guess_number is 'many': input should be a valid integer"
    )
    [problem] = said(name="frozen_lake", settings={"format_penalty": [1]})
    assert problem.startswith("the setting format_penalty of the environment frozen_lake is [1]: ")
    [problem] = said(name="tools", settings={"tools": "calculator"})
    assert "the setting tools of the environment tools is 'calculator'" in problem
    [problem] = said(name="tools")
    assert problem == "the environment tools needs the setting 'tools'; give environment.settings.tools"
