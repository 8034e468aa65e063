"""Hydra's own section: its search path is used, its resolvers work, and the rest is set aside with its place."""

from __future__ import annotations

import os
import re
from datetime import datetime
from pathlib import Path

import pytest

from posttrain.config.reading.compose import compose
from posttrain.config.reading.defaults import read_with_defaults
from posttrain.dialects.detect import read_config
from posttrain.errors import ConfigError

USER = "hydra:\n  searchpath:\n    - file://trainer/config\ndefaults: [base, _self_]\nb: 2\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """trainer/config/base.yaml, and examples/config/run.yaml which starts from it by Hydra's search path."""
    for name, text in {"trainer/config/base.yaml": "a: 1\nb: 1\n", "examples/config/run.yaml": USER}.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
    return tmp_path


@pytest.mark.parametrize("at", [".", "examples", "examples/config", "/"])
def test_the_search_path_is_followed_from_any_folder(checkout: Path, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout / at)
    values, places = read_with_defaults(str(checkout / "examples/config/run.yaml"), {})
    assert (values["a"], values["b"]) == (1, 2)
    assert places["a"].text.endswith("trainer/config/base.yaml:1")


def test_a_file_beside_wins_over_the_search_path_and_both_over_what_a_peer_ships(checkout: Path) -> None:
    run = checkout / "examples/config/run.yaml"
    assert read_with_defaults(str(run), {"base": lambda: {"a": 7}})[0]["a"] == 1
    (run.parent / "base.yaml").write_text("a: 5\n")
    assert read_with_defaults(str(run), {"base": lambda: {"a": 7}})[0]["a"] == 5


def test_a_name_that_begins_with_a_slash_starts_at_the_folder_of_the_first_file(tmp_path: Path) -> None:
    (tmp_path / "group").mkdir()
    (tmp_path / "run.yaml").write_text("defaults: [group/one@_here_]\n")
    (tmp_path / "group/one.yaml").write_text("defaults: [/two@_here_, _self_]\na: 1\n")
    (tmp_path / "two.yaml").write_text("c: 3\n")
    assert read_with_defaults(str(tmp_path / "run.yaml"), {})[0] == {"a": 1, "c": 3}


@pytest.mark.parametrize("listed", ["searchpath: [pkg://verl.trainer.config, file://nowhere]", "run: {dir: .}"])
def test_a_search_path_that_leads_nowhere_leaves_what_a_peer_ships(tmp_path: Path, listed: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"hydra:\n  {listed}\ndefaults: [base, _self_]\n")
    assert read_with_defaults(str(file), {"base": lambda: {"a": 7}})[0]["a"] == 7


def test_the_section_is_set_aside_with_its_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("hydra:\n  run:\n    dir: .\n  output_subdir: null\na: 1\n")
    composed = compose("run.yaml", ["hydra.job.chdir=true", "a=2"], struct=True)
    assert composed.values == {"a": 2}
    assert not any(key.startswith("hydra") for key in composed.sources.places)
    assert composed.hydra == {
        "hydra.run.dir": "run.yaml:3",
        "hydra.output_subdir": "run.yaml:4",
        "hydra.job.chdir": "override hydra.job.chdir=true",
    }


def test_a_dialect_reports_its_keys_as_ignored_and_native_files_may_hold_them(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("hydra:\n  run:\n    dir: .\ndefaults: [ppo_trainer, _self_]\n")
    loaded = read_config(str(file), ["hydra.run.dir=x"], "verl")
    assert [one.key for one in loaded.ignored if "Hydra" in one.reason] == ["hydra.run.dir"]
    assert not [problem for problem in loaded.problems if "hydra" in str(problem)]
    file.write_text("hydra: {run: {dir: .}}\nmodel: {path: m}\n")
    assert not [problem for problem in read_config(str(file), [], "native").problems if "hydra" in str(problem)]


def test_now_is_one_moment_in_the_whole_configuration(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("a: runs/${now:%Y%m%d_%H%M%S}\nb: ${now:%Y%m%d_%H%M%S}\nc: ${hydra:runtime.cwd}\n")
    values = compose(str(file), []).values
    assert re.fullmatch(r"runs/\d{8}_\d{6}", values["a"])
    assert values["a"] == f"runs/{values['b']}"
    assert abs((datetime.now() - datetime.strptime(values["b"], "%Y%m%d_%H%M%S")).days) <= 1
    assert values["c"] == os.getcwd()


def test_what_only_hydras_program_knows_is_a_problem_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("a: 1\nb: ${hydra:job.name}\n")
    with pytest.raises(ConfigError, match=r"hydra:job\.name belongs to Hydra's own program.*run\.yaml:2 b"):
        compose(str(file), [])
