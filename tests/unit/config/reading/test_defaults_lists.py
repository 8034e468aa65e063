# ruff: noqa: E501  # messages stand as they are printed, in one line
"""Defaults lists, as Hydra composes them: order, packages, files in other folders, what a peer ships."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.config.reading.defaults import read_with_defaults, split_choices
from posttrain.errors import ConfigError


@pytest.fixture
def write(tmp_path: Path):
    def files(**texts: str) -> str:
        for name, text in texts.items():
            file = tmp_path / f"{name.replace('__', '/')}.yaml"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return str(tmp_path / "run.yaml")

    return files


def test_the_file_wins_over_what_it_names_unless_it_says_where_it_stands(write) -> None:
    base = "a: 1\nb: {c: 2, d: 3}\n"
    values, _ = read_with_defaults(write(base=base, run="defaults: [base]\na: 9\nb: {c: 8}\n"), {})
    assert values == {"a": 9, "b": {"c": 8, "d": 3}}
    values, _ = read_with_defaults(write(base=base, run="defaults: [_self_, base]\na: 9\nb: {c: 8}\n"), {})
    assert values == {"a": 1, "b": {"c": 2, "d": 3}}


def test_here_puts_a_file_of_another_folder_at_the_top_and_its_places_are_its_own(write, tmp_path) -> None:
    text = "defaults:\n  - ../config/envs@_here_\nsteps: 5\n"
    path = write(jobs__run=text, config__envs="\nenvs: {grid: {size: 4}}\nsteps: 1\n").replace(
        "run.yaml", "jobs/run.yaml"
    )
    values, places = read_with_defaults(path, {})
    assert values == {"envs": {"grid": {"size": 4}}, "steps": 5}
    assert places["envs.grid"].text.endswith("config/envs.yaml:2")
    assert places["steps"].text.endswith("jobs/run.yaml:3")
    assert not any(key.startswith("defaults") for key in places)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("optim/adam", {"optim": {"lr": 1}}),  # a group is a package
        ("optim: adam", {"optim": {"lr": 1}}),
        ("optim/adam@actor.optim", {"actor": {"optim": {"lr": 1}}}),
        ("optim@actor.optim: adam", {"actor": {"optim": {"lr": 1}}}),
        ("optim/adam@_global_", {"lr": 1}),
        ("optional optim: sgd", {}),
        ("optim: null", {}),
        ("hydra/job_logging: disabled", {}),
        ("override hydra/launcher: basic", {}),
    ],
)
def test_entries(write, entry: str, expected: dict[str, object]) -> None:
    path = write(run=f"defaults:\n  - {entry}\n", optim__adam="lr: 1\n")
    assert read_with_defaults(path, {})[0] == expected


def test_several_options_of_a_group_are_laid_upon_each_other(write) -> None:
    run = "defaults:\n  - ../engine@trained:\n      - wide\n      - deep\n  - _self_\n"
    written = write(engine__wide="a: 1\nb: 2\n", engine__deep="b: 3\n", jobs__run=run)
    values, _ = read_with_defaults(written.replace("run.yaml", "jobs/run.yaml"), {})
    assert values == {"trained": {"a": 1, "b": 3}}
    with pytest.raises(ConfigError, match="there is no file"):
        read_with_defaults(write(run="defaults:\n  - engine: [wide, flat]\n"), {})


def test_files_that_name_files(write) -> None:
    path = write(run="defaults: [middle]\nc: 3\n", middle="defaults: [deep]\nb: 2\n", deep="a: 1\nb: 1\nc: 1\n")
    assert read_with_defaults(path, {})[0] == {"a": 1, "b": 2, "c": 3}


def test_what_a_peer_ships_is_there_without_a_file_and_counts_as_default(write) -> None:
    path = write(run="defaults: [ppo_trainer, _self_]\nb: 2\n")
    values, places = read_with_defaults(path, {"ppo_trainer": lambda: {"a": 1, "b": 1}})
    assert values == {"a": 1, "b": 2}
    assert list(places) == ["b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("defaults: [bse]\n", "the defaults list names bse, and there is no file {}/bse.yaml, at {}/run.yaml:1; did you mean base?"),
        ("defaults: base\n", "defaults must be a list of file names, at {}/run.yaml:1"),
        ("x: 1\ndefaults:\n  - base\n  - 7\n", "7 is no entry of a defaults list, at {}/run.yaml:4; write a file name"),
        ("defaults: [run]\n", "run.yaml leads back to itself through its defaults list, at {}/run.yaml:1"),
    ],
)  # fmt: skip
def test_what_cannot_be_found(write, tmp_path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_with_defaults(write(run=text, base="a: 1\n"), {})
    assert str(caught.value).replace(str(tmp_path), "{}") == message


@pytest.fixture
def grouped(tmp_path: Path) -> Path:
    """A file whose defaults list names options of two groups."""
    for name, text in {
        "run.yaml": "defaults:\n  - optim: adam\n  - parts/model@actor.model: small\n  - _self_\nn: 1\n",
        "optim/adam.yaml": "lr: 1\n",
        "optim/sgd.yaml": "lr: 2\nmomentum: 3\n",
        "parts/model/small.yaml": "size: 1\n",
        "parts/model/big.yaml": "size: 9\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path / "run.yaml"


def test_the_command_line_chooses_options_of_groups(grouped: Path) -> None:
    """As in Hydra: GROUP=OPTION, and GROUP@PACKAGE=OPTION where the list names a package."""
    choices, rest = split_choices(str(grouped), ["optim=sgd", "parts/model@actor.model=big", "n=2", "optim.lr=5"])
    assert rest == ["n=2", "optim.lr=5"]
    values, places = read_with_defaults(str(grouped), {}, choices)
    assert values == {"optim": {"lr": 2, "momentum": 3}, "actor": {"model": {"size": 9}}, "n": 1}
    assert places["optim.lr"].text.endswith("optim/sgd.yaml:1")


def test_what_is_no_group_stays_an_override(grouped: Path) -> None:
    texts = ["model=big", "parts/model=big", "optim@other=sgd", "n=1", "+k=v"]
    assert split_choices(str(grouped), texts) == ({}, texts)
    assert split_choices(None, texts) == ({}, texts)


def test_an_option_that_does_not_exist_is_reported(grouped: Path) -> None:
    choices, _ = split_choices(str(grouped), ["optim=sdg"])
    with pytest.raises(ConfigError, match=r"the defaults list names optim/sdg, .*did you mean sgd\?"):
        read_with_defaults(str(grouped), {}, choices)
