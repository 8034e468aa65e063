"""Configurations of a program: Python values arrive as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import posttrain
from posttrain.api.configs import as_overrides
from posttrain.config.reading.overrides import parse_overrides
from posttrain.errors import ConfigError, RequestError

RUN = "model:\n  path: m\ndata:\n  train_files: [t.jsonl]\nreward:\n  terms: [{name: exact_match}]\n"
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**12), 10**12),
    st.floats(allow_nan=False),
    st.text("ab\\'\"${}[]=,: \t#é", max_size=8),
)


@given(
    st.recursive(
        SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    )
)
def test_any_value_of_an_override_arrives(value: object) -> None:
    [assignment] = parse_overrides(as_overrides({"some.key": value}))
    assert assignment.key == "some.key" and assignment.value == value


def test_a_file_with_overrides_of_both_kinds(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    by_text = posttrain.load(tmp_path / "run.yaml", ["policy.optimizer.lr=1e-5", "run.name=its"])
    by_value = posttrain.load(str(tmp_path / "run.yaml"), {"policy.optimizer.lr": 1e-5, "run.name": "its"})
    assert by_text.config == by_value.config
    assert by_value.config.policy.optimizer.lr == 1e-5 and by_value.config.run.name == "its"


def test_what_is_no_override() -> None:
    with pytest.raises(ConfigError, match="a list of texts"):
        posttrain.load(None, "a.b=1")
    with pytest.raises(ConfigError, match=r"cannot hold object .* at override run.name"):
        posttrain.load(None, {"run.name": object()})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (5, "not int 5"),
        (None, "not NoneType"),
        ([3], "in a list is a text, not int 3"),
        ({3: 4}, "key of an override is a text, not int 3"),
        ({"data": {"train_files": {1}}}, "cannot hold set"),
    ],
)
def test_overrides_of_another_type(overrides: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        posttrain.load(None, overrides)


@pytest.mark.parametrize("path", [3, {"a": 1}, b"run.yaml", "", "\0"])
def test_what_is_no_path(path: Any) -> None:
    with pytest.raises(ConfigError, match=r"^path is "):
        posttrain.load(path)


def test_a_dialect_is_a_name() -> None:
    with pytest.raises(ConfigError, match="dialect is a name, not int 3"):
        posttrain.load(None, dialect=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("configuration", [None, {"model": {}}, 3, ["run.yaml"]])
@pytest.mark.parametrize("verb", ["plan", "train", "start"])
def test_what_is_no_configuration(verb: str, configuration: Any) -> None:
    with pytest.raises(ConfigError, match="a configuration is a file's path"):
        made = getattr(posttrain, verb)(configuration)
        if verb == "start":
            made.__enter__()


@pytest.mark.parametrize("folder", [None, 3])
def test_what_is_no_run_folder(folder: Any) -> None:
    with pytest.raises(RequestError, match="folder must be str or Path, not"):
        posttrain.Run(folder)


def test_a_plan_is_that_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    plan = posttrain.plan(
        tmp_path / "run.yaml", {"data.prompts_per_step": 16, "rollout.samples_per_prompt": 8}, look_at_files=False
    )
    assert plan.trains and "trains here" in str(plan)
    assert plan.values["derived"]["sequences_per_step"] == 128
    assert posttrain.plan(posttrain.load(tmp_path / "run.yaml").config, look_at_files=False).trains


def test_all_problems_are_raised_together(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN + "policy:\n  optimiser: {}\nlos: {}\n")
    with pytest.raises(RequestError) as raised:
        posttrain.plan(tmp_path / "run.yaml")
    text = str(raised.value)
    assert "run.yaml:8" in text and "did you mean policy.optimizer?" in text and "run.yaml:9" in text


def test_overrides_of_a_configuration_that_is_already_read(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    with pytest.raises(ConfigError, match="overrides change a file"):
        posttrain.plan(posttrain.load(tmp_path / "run.yaml"), {"run.seed": 1})
