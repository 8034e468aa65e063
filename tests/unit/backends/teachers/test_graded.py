"""The most likely tokens of a server's answer."""

from __future__ import annotations

import pytest

from posttrain.backends.serving.protocol import UnusableAnswer
from posttrain.backends.teachers.graded import AnswerReader, GradedToken

READER = AnswerReader(server="server", vocabulary=5)


def test_a_token_that_the_student_lacks_is_passed_over() -> None:
    """A teacher may have tokens besides; the prompt's own, listed beside the most likely ones, has an exact log-prob, too."""
    graded = READER.read(_answer({"7": -0.2, "2": -2.5, "1": -3.0}), [0, 1], [1])[0]
    assert graded == GradedToken(token=1, listed={7: -0.2, 2: -2.5, 1: -3.0}) and graded.logprob == -3.0
    assert READER.top(graded, 2) == [(2, -2.5), (1, -3.0)]
    with pytest.raises(
        UnusableAnswer, match="gave 3 of the 3 most likely tokens, and the student, whose tokens end at 4,"
    ):
        READER.top(graded, 3)


def test_fewer_tokens_than_asked_for_are_refused() -> None:
    graded = READER.read(_answer({"2": -0.5, "1": -3.0}), [0, 1], [1])[0]
    with pytest.raises(UnusableAnswer, match="the server gave 2 of the 3 most likely tokens; the server must answer"):
        READER.top(graded, 3)


def _answer(listed: dict[str, float]) -> object:
    return {"choices": [{"prompt_logprobs": [None, {token: {"logprob": value} for token, value in listed.items()}]}]}
