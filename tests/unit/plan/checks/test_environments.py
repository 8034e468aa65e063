"""Environments that could not be played are problems of the plan, with the setting that is wrong and the name that was meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.config import RunConfig
from posttrain.plan.checks.environments import check_environments

WORLDS = """
raise SystemExit("a plan runs no code of the user's")

class Maze:
    def __init__(self, spec, *, size, walls=2): ...
    def reset(self, seed): ...
    def step(self, action): ...
    def close(self): ...

class Rested(Maze):
    pass

class Unfinished:
    def __init__(self, spec): ...
    def rest(self, seed): ...
    def step(self, action): ...
    def close(self): ...

class Alone:
    pass

class Judge:
    def __init__(self, spec, weight=1.0): ...
    async def score(self, conversation): ...

class Sorry:
    def __init__(self, spec): ...
    def scores(self, conversation): ...

def play(episode, tries=1): ...
def weather(city): ...
class Talk:
    def __init__(self, config): ...
    def generate_respons(self, instance, messages): ...
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "worlds.py").write_text(WORLDS)
    (tmp_path / "wiki.jsonl").write_text('{"text": "a"}\n')
    return tmp_path


def said(name: str | None = None, settings: dict[str, Any] | None = None, **more: Any) -> list[tuple[str, str, str]]:
    environment = {"name": name, "settings": settings or {}, **more}
    held_out = environment.pop("validation_files", [])
    data = {"train_files": more.pop("files", ["f.jsonl"]), "validation_files": held_out}
    environment.pop("files", None)
    config = RunConfig.model_validate({"model": {"path": "m"}, "data": data, "environment": environment})
    return [(problem.field, problem.what, problem.fix) for problem in check_environments(config)]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("worlds.py:Maze", {"size": 3}),
        ("worlds:Rested", {"size": 3, "walls": 1}),
        ("guess_number", {"high": 20}),
        ("frozen_lake", {"size": 5, "template": "{observation}"}),
        ("agent", {"function": "worlds.py:play", "options": {"tries": 2}}),
        ("tools", {"tools": ["calculator", {"name": "search", "corpus": "wiki.jsonl"}]}),
        ("tools", {"tools": [{"name": "worlds.py:weather", "city": "x"}]}),
        ("interaction", {"interactions": [{"name": "gsm8k", "class_name": "gsm8k"}]}),
        ("skyrl_gym", {"env_class": "gsm8k_multi_turn"}),
    ],
)  # fmt: skip
def test_what_can_be_played(name: str, settings: dict[str, Any]) -> None:
    assert said(name, settings) == []


@pytest.mark.parametrize(
    ("name", "settings", "field", "what", "fix"),
    [
        ("wolds.py:Maze", {}, "name", "there is no file wolds.py", "did you mean worlds.py?"),
        ("wolds:Maze", {}, "name", "there is no module wolds", "did you mean worlds?"),
        ("worlds.py:Maz", {}, "name", "worlds.py defines no 'Maz'", "did you mean Maze?"),
        ("worlds.py:Maze", {"sise": 1, "size": 2}, "settings.sise", "takes no setting 'sise'", "did you mean size?"),
        ("worlds.py:Rested", {}, "settings", "worlds.py:Rested needs the keyword setting 'size'", "give environment"),
        ("worlds.py:Unfinished", {}, "name", "worlds.py:Unfinished has no method 'reset'", "rename rest to reset"),
        ("worlds.py:Alone", {}, "name", "is called with 1 argument and its settings, and takes none", "let its first"),
        ("guess_number", {"low": 5, "high": 5}, "settings.high", "low is 5 and high is 5", "use a high above low"),
        ("sokoban", {"action_pattern": "(("}, "settings.action_pattern", "is no regular expression", "<answer>"),
        ("frozen_lake", {"template": "{map}"}, "settings.template", "the template of a turn cannot be filled", "fields"),
        ("agent", {}, "settings", "neither is given", "give environment.settings.function"),
        ("agent", {"function": "worlds.py:paly"}, "settings.function", "defines no 'paly'", "did you mean play?"),
        ("agent", {"function": "worlds.py:play", "options": {"trys": 1}}, "settings.options.trys", "takes no", "tries?"),
        ("agent", {"command": ["no-such-program"]}, "settings.command", "no program no-such-program", "install it"),
        ("agent", {"command": ["python", "world.py"]}, "settings.command", "there is no file world.py", "worlds.py?"),
        ("tools", {"tools": []}, "settings.tools", "tools is empty", "calculator"),
        ("tools", {"tools": ["calculater"]}, "settings.tools.0", "no tool called 'calculater'", "did you mean calculator?"),
        ("tools", {"tools": [{"name": "python", "timout_s": 1}]}, "settings.tools.0.timout_s", "no option", "timeout_s?"),
        ("tools", {"tools": [{"name": "search", "corpus": "wike.jsonl"}]}, "settings.tools.0.corpus", "no file", "wiki.jsonl?"),
        ("tools", {"tools": [{"name": "search"}]}, "settings.tools.0", "needs the option 'corpus'", "give environment"),
        ("tools", {"tools": [{"name": "mcp", "url": "u", "token_env": "NO_SUCH"}]}, "settings.tools.0.token_env", "not set", ""),
        ("tools", {"tools": [{"name": "worlds.py:wether"}]}, "settings.tools.0.name", "defines no", "did you mean weather?"),
        ("interaction", {"interactions": [{"class_name": "worlds.Talk"}]}, "settings.interactions.0.class_name",
         "has no method 'generate_response'", "rename generate_respons to generate_response"),
        ("interaction", {"interactions": [{"clas_name": "gsm8k"}]}, "settings.interactions.0.clas_name", "has no", "class_name?"),
        ("skyrl_gym", {"env_class": "gsm8k_multi_trn"}, "settings.env_class", "no environment 'gsm8k_multi_trn'", "multi_turn?"),
        ("skyrl_gym", {"env_class": "worlds:Maz"}, "settings.env_class", "defines no 'Maz'", "did you mean Maze?"),
        ("skyrl_gym", {"env_class": "aime", "configs": {"serch": {}}}, "settings.configs.serch", "'serch'", "mean search?"),
        ("skyrl_gym", {"env_class": "lcb"}, "settings.env_class", "without a sandbox", "allow_unboxed_code=true"),
    ],
)  # fmt: skip
def test_what_could_not_be_played(name: str, settings: dict[str, Any], field: str, what: str, fix: str) -> None:
    found = said(name, settings)
    assert any(at == f"environment.{field}" and what in told and fix in hint for at, told, hint in found), found


def test_an_environment_of_rows_has_its_tag_in_the_field() -> None:
    [(field, what, _)] = said(named={"maze": {"name": "worlds.py:Maz"}})
    assert field == "environment.named.maze.name" and "defines no 'Maz'" in what


def test_an_environment_of_an_open_run_steps_or_scores() -> None:
    def of_open(name: str, **settings: Any) -> list[tuple[str, str, str]]:
        return said("open", {"scored_by": "own", **settings}, named={"own": {"name": name}})

    assert of_open("worlds.py:Judge") == [] == said("open", named={"own": {"name": "guess_number"}})
    assert said("worlds.py:Judge")[0][1].startswith("worlds.py:Judge has no method 'reset'")
    [(field, what, fix)] = of_open("worlds.py:Sorry")
    assert (field, fix) == ("environment.named.own.name", "rename scores to score")
    assert (
        what
        == "worlds.py:Sorry cannot score a conversation: it has no method 'score', and not all of reset, step, close"
    )
    [(field, what, _)] = of_open("worlds.py:Judge", ends_after_s=400)
    assert field == "environment.settings.ends_after_s" and "fails after 300 s" in what


def test_validation_of_an_open_run_needs_environments_that_can_be_played(here: Path) -> None:
    named = {
        "own": {"name": "worlds.py:Judge", "validation_weight": 0.0},
        "maze": {"name": "worlds.py:Maze", "settings": {"size": 2}},
    }
    assert said("open", named=named, validation_episodes=4) == []
    named["own"]["validation_weight"] = 1.0
    found = said("open", named=named, validation_episodes=4)
    assert {field for field, _, _ in found} == {"environment.named.own.name"}
    assert found[0][1].startswith("worlds.py:Judge has no method 'reset'")
    assert found[0][1].endswith("so it can score conversations but not play the validation")
    (here / "held_out.jsonl").write_text('{"prompt": "a", "env_class": "maze"}\n{"prompt": "b"}\n')
    [(field, what, fix)] = said("open", named=named, validation_files=["held_out.jsonl"])
    assert field == "environment.named" and "name no environment in column env_class" in what
    assert fix == "name one for them with environment.settings.scored_by"
    assert said("open", {"scored_by": "maze"}, named=named, validation_files=["held_out.jsonl"]) == []


def test_rows_name_environments_that_are_there(here: Path) -> None:
    rows = [{"prompt": "a", "env_class": "maze"}, {"prompt": "a", "extra_info": {"env_class": "maez"}}, {"prompt": "a"}]
    (here / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    named = {"maze": {"name": "worlds.py:Maze", "settings": {"size": 2}}}
    problems = said(named=named, files=["rows.jsonl"])
    assert [fix for _, _, fix in problems] == ["name one for them with environment.name", "did you mean maze?"]
    assert "rows for the environment 'maez'" in problems[1][1] and problems[1][0] == "environment.named"
    rows = [{"prompt": "a", "env_class": "gsm8k_multi_trn"}]
    (here / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    [(_, what, fix)] = said("skyrl_gym", files=["rows.jsonl"])
    assert "asked for in rows.jsonl" in what and fix == "did you mean gsm8k_multi_turn?"
