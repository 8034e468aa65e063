"""Names that were probably meant."""

from __future__ import annotations

import pytest

from posttrain.errors import Problem, RequestError, RunStopped, ShapeError, did_you_mean, nearest
from posttrain.registry import ADVANTAGES


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("ppo", ["dppo_tv", "dppo_kl", "ppo_clip"], "ppo_clip"),  # it begins so; dppo_kl only looks alike
        ("clip", ["clip_cov", "ppo_clip"], "clip_cov"),
        ("grop", ["gpg", "grpo"], "grpo"),
        ("a", ["alpha", "beta"], None),  # one letter is no beginning
        ("wandb", ["console", "jsonl"], None),
    ],
)
def test_nearest(name: str, known: list[str], meant: str | None) -> None:
    assert nearest(name, known) == meant


def test_names_are_listed_once() -> None:
    assert did_you_mean("wandb", ["jsonl", "console"]) == "known: console, jsonl"
    assert did_you_mean("wandb", ["jsonl", "console"], listed=True) == ""
    assert did_you_mean("consle", ["jsonl", "console"], listed=True) == "did you mean console?"


def test_a_notebook_shows_the_callers_line_and_the_text() -> None:
    """IPython prints these lines in place of a traceback; a programming error keeps its own."""
    with pytest.raises(RequestError) as raised:
        ADVANTAGES.get("grop")
    first, second = raised.value._render_traceback_()
    assert first.endswith('ADVANTAGES.get("grop")') and first.startswith("line ")
    assert second.startswith("UnknownName: there is no") and "did you mean grpo?" in second
    several = RequestError([Problem("a is 1", fix="use 2"), Problem("b is 3")])
    assert several._render_traceback_() == [
        "RequestError: 2 problems, and nothing was started:",
        "1. a is 1; use 2",
        "2. b is 3",
    ]
    assert RunStopped("no good\nLast good checkpoint: x")._render_traceback_()[1] == "Last good checkpoint: x"
    assert not hasattr(ShapeError(), "_render_traceback_")
