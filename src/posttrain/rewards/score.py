"""All reward terms together: a weighted sum, or a typed failure. Nothing that cannot be scored is scored 0."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from posttrain.errors import PosttrainError
from posttrain.interfaces.reward import RewardFn
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Invalid, Outcome, Reward, TrajectoryGroup
from posttrain.rewards.sources import NO_REWARD, NoRewardForSource

# The words of Invalid.reason, besides NO_REWARD.
EXCEPTION = "exception"  # a term raised
NOT_A_NUMBER = "not_a_number"  # a term returned nothing, a text, a list, …
NOT_FINITE = "not_finite"  # a term or the sum is NaN, infinite, or beyond float32, in which rewards are kept

_NO_SCORE = object()
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Term:
    name: str
    weight: float
    reward: RewardFn
    data_sources: frozenset[str] = frozenset()  # it counts for prompts of these only; empty means all

    def counts_for(self, data_source: str) -> bool:
        return not self.data_sources or data_source in self.data_sources


class RewardTerms:
    """A GroupScorer: the reward of a response is the sum of weight x value over the terms, in their order.

    A term's value is a number (True and False count as 1 and 0), or a mapping with the number under "score", whose
    other numbers are kept beside it under "<term>/<key>" and do not enter the sum. The first term without a finite
    value makes the response Invalid, and so does a data source that no term counts for, unless ``may_be_none``: then the
    reward is 0, and something else (a reward model) is added to it. ``Reward.terms`` holds the values before their weights.
    """

    def __init__(self, terms: Sequence[Term], *, may_be_none: bool = False):
        self.terms = tuple(terms)
        self._may_be_none = may_be_none

    def score(self, group: TrajectoryGroup) -> tuple[Outcome, ...]:
        """An outcome per response, in order. Never raises for what a response or a grader does."""
        return tuple(self.score_response(group.prompt, trajectory.text) for trajectory in group.trajectories)

    def score_response(self, prompt: Prompt, response: str) -> Outcome:
        """The outcome of one response to a prompt."""
        total = 0.0
        values: list[tuple[str, float]] = []
        terms = [term for term in self.terms if term.counts_for(prompt.data_source)]
        if not terms and not self._may_be_none:
            return Invalid(NO_REWARD, f"no reward term counts for data source {prompt.data_source!r}")
        for term in terms:
            try:
                result = term.reward(prompt, response)
            except NoRewardForSource as error:
                return Invalid(NO_REWARD, f"{term.name}: {error}")
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a grader may fail in any way; it is counted and shown
                return Invalid(EXCEPTION, f"{term.name}: {_describe(error)}")
            score = result.get("score", _NO_SCORE) if isinstance(result, Mapping) else result
            value = _number(score, term.name)
            if isinstance(value, Invalid):
                return value
            total += term.weight * value
            values.append((term.name, value))
            values += _extras(result, term.name)
        if not abs(total) <= LARGEST:  # written so that NaN (inf - inf) fails too
            return Invalid(NOT_FINITE, f"the weighted sum is {total}")
        return Reward(total, tuple(values))


def _number(value: Any, name: str) -> float | Invalid:
    if not isinstance(value, (Real, np.bool_)):
        return Invalid(NOT_A_NUMBER, f"{name}: returned {_shown(value)}; a number is expected")
    try:
        number = float(value)
    except OverflowError:  # an integer of more than 308 digits
        number = math.inf
    if not abs(number) <= LARGEST:
        return Invalid(NOT_FINITE, f"{name}: returned {number}")
    return number


def _extras(result: Any, name: str) -> list[tuple[str, float]]:
    """The finite numbers beside "score"; texts and the rest are left out."""
    if not isinstance(result, Mapping):
        return []
    numbers = [(f"{name}/{key}", _number(value, name)) for key, value in result.items() if key != "score"]
    return [(key, value) for key, value in numbers if isinstance(value, float)]


def _describe(error: BaseException) -> str:
    """An error in at most 500 characters: some quote the whole response."""
    text = str(error) if isinstance(error, PosttrainError) else traceback.format_exception_only(error)[-1].strip()
    return text if len(text) <= 500 else f"{text[:500]}…"


def _shown(value: Any) -> str:
    if value is None:
        return "None"
    if value is _NO_SCORE:
        return 'a mapping without "score"'
    if isinstance(value, str):
        return f"the text {value[:80]!r}"
    return f"a {type(value).__name__}"
