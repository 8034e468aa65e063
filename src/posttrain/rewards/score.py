"""All reward terms together: a weighted sum, or a typed failure. Nothing that cannot be scored is scored 0.

A response is scored in two halves that may run in different processes: ``RewardTerms`` asks the functions, ``combine`` makes
one outcome of their answers.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from posttrain.errors import PosttrainError
from posttrain.interfaces.reward import BatchedRewardFn, NotScored, RewardFn
from posttrain.processes.limits import EXCEPTION, MEMORY
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Invalid, Outcome, Reward, TrajectoryGroup
from posttrain.rewards.halves import ask_in_halves
from posttrain.rewards.sources import NO_REWARD, NoRewardForSource

# The words of Invalid.reason, besides NO_REWARD and those of workers.limits.
NOT_A_NUMBER = "not_a_number"  # a term returned nothing, a text, a list, …
NOT_FINITE = "not_finite"  # a term or the sum is NaN, infinite, or beyond float32, in which rewards are kept
WRONG_LENGTH = "wrong_length"  # a batched term returned no list, or one of another length than that of the responses

_NO_SCORE = object()
LARGEST = float(np.finfo(np.float32).max)
LONGEST_TEXT = 1000  # characters of a text beside a score


@dataclass(frozen=True, slots=True)
class Term:
    name: str
    weight: float
    reward: RewardFn | BatchedRewardFn | None  # None: it lives in another process
    data_sources: frozenset[str] = frozenset()  # it counts for prompts of these only; empty means all
    batched: bool = False  # reward is a BatchedRewardFn
    halve: bool = True  # a batched call that fails is made again about halves

    def counts_for(self, data_source: str) -> bool:
        return not self.data_sources or data_source in self.data_sources


@dataclass(frozen=True, slots=True)
class TermValue:
    """What a term gave: a finite number, and the finite numbers and the texts beside it by name."""

    value: float
    extras: tuple[tuple[str, float], ...] = ()
    texts: tuple[tuple[str, str], ...] = ()


TermAnswer = TermValue | Invalid


def combine(
    terms: Sequence[Term], answers: Mapping[int, TermAnswer], data_source: str, *, may_be_none: bool = False
) -> Outcome:
    """The sum of weight x value over the terms that count for a data source, in their order; the first failure among them
    makes it Invalid, and so does a data source that no term counts for, unless ``may_be_none``: then the sum is 0.

    Args: ``answers`` by the term's place; those behind a failure may be missing. ``Reward.terms`` holds the values before
    their weights.
    """
    counting = [index for index, term in enumerate(terms) if term.counts_for(data_source)]
    if not counting and not may_be_none:
        return Invalid(NO_REWARD, f"no reward term counts for data source {data_source!r}")
    total = 0.0
    values: list[tuple[str, float]] = []
    texts: list[tuple[str, str]] = []
    for index in counting:
        term, answer = terms[index], answers[index]
        if isinstance(answer, Invalid):
            return answer
        total += term.weight * answer.value
        values.append((term.name, answer.value))
        values += [(f"{term.name}/{key}", value) for key, value in answer.extras]
        texts += [(f"{term.name}/{key}", text) for key, text in answer.texts]
    if not abs(total) <= LARGEST:  # written so that NaN (inf - inf) fails too
        return Invalid(NOT_FINITE, f"the weighted sum is {total}")
    return Reward(total, tuple(values), tuple(texts))


class RewardTerms:
    """The functions behind the terms.

    A term's value is a number (True and False count as 1 and 0), or a mapping with the number under "score", whose other
    numbers and texts are kept beside it under "<term>/<key>" and do not enter the sum. The text "pred" is the answer that
    was found in the response: answers vote by it.
    """

    def __init__(self, terms: Sequence[Term], *, may_be_none: bool = False):
        self.terms = tuple(terms)
        self._may_be_none = may_be_none

    def score(self, group: TrajectoryGroup) -> tuple[Outcome, ...]:
        """An outcome per response, in order; a batched term is asked about this group at once. Never raises for what a
        response or a grader does."""
        prompt, responses = group.prompt, [trajectory.text for trajectory in group.trajectories]
        asked = {
            index: self._ask_about_group(index, prompt, responses)
            for index, term in enumerate(self.terms)
            if term.batched and term.counts_for(prompt.data_source)
        }
        return tuple(
            self._outcome(prompt, response, {index: answers[number] for index, answers in asked.items()})
            for number, response in enumerate(responses)
        )

    def _ask_about_group(self, index: int, prompt: Prompt, responses: Sequence[str]) -> list[TermAnswer]:
        def ask(ranges: Sequence[range]) -> list[list[TermAnswer] | Invalid]:
            return [
                self.ask_batched(index, [prompt] * len(each), [responses[place] for place in each]) for each in ranges
            ]

        return ask_in_halves(len(responses), ask, halve=self.terms[index].halve)

    def score_response(self, prompt: Prompt, response: str) -> Outcome:
        """The outcome of one response to a prompt, where no term is batched."""
        return self._outcome(prompt, response, {})

    def _outcome(self, prompt: Prompt, response: str, batched: Mapping[int, TermAnswer]) -> Outcome:
        try:
            answers = self.ask(prompt, response)
        except MemoryError as error:
            return Invalid(MEMORY, str(error))
        return combine(self.terms, {**answers, **batched}, prompt.data_source, may_be_none=self._may_be_none)

    def ask(self, prompt: Prompt, response: str) -> dict[int, TermAnswer]:
        """What the terms that are not batched say, by their place, up to the first failure.

        Raises: MemoryError, after which the process may be short of memory for what comes next. Nothing else that is the
            fault of a response or a grader.
        """
        answers: dict[int, TermAnswer] = {}
        for index, term in enumerate(self.terms):
            if term.batched or not term.counts_for(prompt.data_source):
                continue
            reward: Any = term.reward
            found = _tried(term.name, lambda reward=reward: reward(prompt, response))  # type: ignore[misc]
            answers[index] = answer = found if isinstance(found, Invalid) else _value(found[0], term.name)
            if isinstance(answer, Invalid):
                break
        return answers

    def ask_batched(
        self, index: int, prompts: Sequence[Prompt], responses: Sequence[str]
    ) -> list[TermAnswer] | Invalid:
        """What a batched term says of these responses: one answer each; Invalid when the call as a whole failed.

        Raises: MemoryError, as ``ask``.
        """
        term = self.terms[index]
        reward: Any = term.reward
        found = _tried(term.name, lambda: reward(prompts, responses))
        if isinstance(found, Invalid):
            return found
        results = found[0].tolist() if isinstance(found[0], np.ndarray) else found[0]
        if not isinstance(results, (list, tuple)):
            return Invalid(
                WRONG_LENGTH, f"{term.name}: returned {_shown(results)}; a list of {len(responses)} is expected"
            )
        if len(results) != len(responses):
            return Invalid(WRONG_LENGTH, f"{term.name}: returned {len(results)} values for {len(responses)} responses")
        return [_value(result, term.name) for result in results]


def _tried(name: str, ask: Callable[[], Any]) -> tuple[Any] | Invalid:
    """What a term returned, or why it did not. Raises: MemoryError."""
    try:
        return (ask(),)
    except NoRewardForSource as error:
        return Invalid(NO_REWARD, f"{name}: {error}")
    except NotScored as error:
        return Invalid(error.reason, f"{name}: {error}")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a grader may fail in any way; it is counted and shown
        described = f"{name}: {_describe(error)}"
        if isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError):
            raise MemoryError(described) from None  # without the frames that hold the memory
        return Invalid(EXCEPTION, described)


def _value(result: Any, name: str) -> TermAnswer:
    score = result.get("score", _NO_SCORE) if isinstance(result, Mapping) else result
    value = _number(score, name)
    if isinstance(value, Invalid):
        return value
    return TermValue(value, tuple(_extras(result, name)), tuple(_texts(result)))


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
    """The finite numbers beside "score"; the rest is left out."""
    if not isinstance(result, Mapping):
        return []
    numbers = [(str(key), _number(value, name)) for key, value in result.items() if key != "score"]
    return [(key, value) for key, value in numbers if isinstance(value, float)]


def _texts(result: Any) -> list[tuple[str, str]]:
    """The texts beside "score", each up to LONGEST_TEXT."""
    if not isinstance(result, Mapping):
        return []
    return [(str(key), value[:LONGEST_TEXT]) for key, value in result.items() if isinstance(value, str)]


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
