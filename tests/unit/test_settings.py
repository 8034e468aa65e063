"""Types, bounds and meanings of settings, as they are read from source."""

from __future__ import annotations

import ast
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError

from posttrain.settings import REQUIRED, Positive, Setting, default_of, is_number, meanings, merged, type_of


def annotation(text: str) -> Any:
    return type_of(ast.parse(text, mode="eval").body)


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ("int", [1, "2"], [1.5, "x", True]),
        ("float", [1, 0.5], ["x", True, float("nan")]),
        ("bool", [True, False], ["perhaps"]),
        ("str", ["x"], [1]),
        ("float | None", [None, 1], ["x"]),
        ("Optional[int]", [None, 1], [0.5]),
        ("Literal['a', 2]", ["a", 2], ["b"]),
        ("list[str]", [["a"], []], ["a", [1]]),
        ("Sequence[float]", [[1, 2]], [["x"]]),
        ("Mapping[str, int]", [{"a": 1}], [{"a": "x"}]),
        ("Positive", [0.1], [0, -1]),
        ("settings.Share", [0, 1], [1.1]),
        ("Annotated[float | None, Field(gt=1)]", [None, 1.5], [1]),
        ("Annotated[int, pydantic.Field(ge=1, le=3)]", [1, 3], [0, 4]),
        ("'float'", [1], ["x"]),
    ],
)
def test_an_annotation_takes_what_it_says(text: str, good: list[Any], bad: list[Any]) -> None:
    setting = Setting("s", annotation(text), REQUIRED, "")
    for value in good:
        setting.checked(value)
    for value in bad:
        with pytest.raises(ValidationError):
            setting.checked(value)


def test_another_annotation_takes_anything() -> None:
    assert annotation("torch.Tensor") is Any and annotation("Foo[int]") is Any


def test_defaults_are_literals() -> None:
    assert default_of(None) is REQUIRED
    assert default_of(ast.parse("-2e-4", mode="eval").body) == -2e-4
    assert default_of(ast.parse("()", mode="eval").body) == []
    with pytest.raises(ValueError, match="malformed"):
        default_of(ast.parse("f()", mode="eval").body)


def test_numbers_are_told_from_what_a_truth_value_may_be() -> None:
    assert is_number(float) and is_number(Positive) and is_number(Annotated[int | None, Field(ge=1)])
    assert is_number(Literal[1, 2])
    assert not is_number(bool) and not is_number(int | bool) and not is_number(Any) and not is_number(float | str)


def test_meanings_are_the_lines_under_settings() -> None:
    text = """Formula.

    Settings:
        first: one line: with a colon.
        second: two
            lines.
    Returns: nothing.
        third: none.
    """
    assert meanings(text) == {"first": "one line: with a colon.", "second": "two lines."}
    assert meanings("Formula.") == {}


def test_one_setting_of_several_functions_says_whose_meaning_is_whose() -> None:
    one, other = Setting("s", float, 1.0, "x."), Setting("s", float, 1.0, "y.")
    assert merged({"a": one, "b": one, "c": other}).meaning == "a, b: x. c: y."
    either = merged({"a": one, "c": Setting("s", str, "", "y.")})
    assert either.checked(2) == 2.0 and either.checked("x") == "x"


@pytest.mark.parametrize("text", ["int", "Positive", "str", "bool", "Literal['b', 'c']", "list[int]", "dict[str, int]"])
def test_an_example_is_a_value_it_takes(text: str) -> None:
    setting = Setting("s", annotation(text), REQUIRED, "")
    setting.checked(setting.example())
    assert Setting("s", float, 3.0, "").example() == 3.0
