"""Combination of all reward terms: a weighted sum, or a typed failure. A response that cannot be scored never gets 0.

Scoring has two halves that may run in different processes: ``RewardTerms`` calls the functions, and ``combine`` builds one
outcome from their answers.
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
from posttrain.rewards.bisection import call_with_bisection
from posttrain.rewards.sources import NO_REWARD, NoRewardForSource

# Values of Invalid.reason, besides NO_REWARD and those of processes.limits.
NOT_A_NUMBER = "not_a_number"  # a term returned None, a text, a list, …
NOT_FINITE = (
    "not_finite"  # a term or the sum is NaN, infinite, or outside the range of float32, in which rewards are kept
)
# A batched term returned no list, or a list whose length is not the number of responses.
WRONG_LENGTH = "wrong_length"

MOST_NAMES = 8  # of a mapping without a score, in its message
LARGEST = float(np.finfo(np.float32).max)
PLAIN_ANSWER = "\n\n\\boxed{0}"  # a response that takes no time to compare with any reference
LONGEST_TEXT = 1000  # characters of a text logged beside a score


@dataclass(frozen=True, slots=True)
class Term:
    name: str
    weight: float
    reward: RewardFn | BatchedRewardFn | None  # None: the function lives in another process
    data_sources: frozenset[str] = frozenset()  # the prompts the term applies to; empty means all
    batched: bool = False  # reward is a BatchedRewardFn
    calculates: bool = False  # by computer algebra, which some texts make exceed any limit
    halve: bool = True  # repeat a failed batched call on halves
    first: bool = False  # of a tuple or a list the first entry is the result
    reads_sequence: bool = False  # the reward gets prompt and response in one text with special tokens
    reads_tokens: bool = False  # the reward gets token ids, as ``ResponseText.tokens`` holds them
    place: str = ""  # file:line of a function of the user's own

    @property
    def called(self) -> str:
        """The name in messages, with the place of a function of the user's own."""
        return f"{self.name}: {self.place}" if self.place else self.name

    def counts_for(self, data_source: str) -> bool:
        return not self.data_sources or data_source in self.data_sources


@dataclass(frozen=True, slots=True)
class ResponseText:
    """A response as reward functions read it."""

    response: str  # without special tokens
    sequence: str = ""  # prompt and response with special tokens; "" when no term reads it
    # prompt_ids, response_ids and response_mask, as lists, and the step where it is known; None when no term reads them
    tokens: Mapping[str, Any] | None = None

    def read_by(self, term: Term) -> Any:
        if term.reads_tokens:
            return self.tokens
        return self.sequence if term.reads_sequence else self.response


# Token ids to text, special tokens kept.
Decode = Callable[[Sequence[int]], str]


def response_texts(
    group: TrajectoryGroup, terms: Sequence[Term], decode: Decode | None, *, step: int | None = None
) -> list[ResponseText]:
    """Return the texts of a group's responses, in order. Without ``decode`` (responses from a file, which have no token ids)
    the sequence is the prompt's text followed by the response's."""
    reads_sequence = any(term.reads_sequence for term in terms)
    reads_tokens = any(term.reads_tokens for term in terms)
    if not reads_sequence and not reads_tokens:
        return [ResponseText(trajectory.text) for trajectory in group.trajectories]
    found = []
    for trajectory in group.trajectories:
        prompt = group.prompt.token_ids if trajectory.prompt_token_ids is None else trajectory.prompt_token_ids
        whole = ""
        tokens: dict[str, Any] | None = None
        if reads_sequence:
            whole = decode([*prompt, *trajectory.token_ids]) if decode else group.prompt.text + trajectory.text
        if reads_tokens:
            mask = trajectory.response_mask or (True,) * len(trajectory.token_ids)
            tokens = {
                "prompt_ids": list(prompt),
                "response_ids": list(trajectory.token_ids),
                "response_mask": [int(one) for one in mask],
                "step": step,
            }
        found.append(ResponseText(trajectory.text, whole, tokens))
    return found


@dataclass(frozen=True, slots=True)
class TermValue:
    """The value of a term: a finite number, and the finite numbers and texts returned beside it, by name."""

    value: float
    extras: tuple[tuple[str, float], ...] = ()
    texts: tuple[tuple[str, str], ...] = ()


TermAnswer = TermValue | Invalid
# The same; a number alone is itself, as most answers of a worker are
SentAnswer = TermAnswer | float


def combine(
    terms: Sequence[Term], answers: Mapping[int, SentAnswer], data_source: str, *, may_be_none: bool = False
) -> Outcome:
    """Sum weight x value over the terms that count for a data source, in their order. The first failure among them makes the
    outcome Invalid, as does a data source that no term counts for, unless ``may_be_none``: then the sum is 0.

    Args: ``answers`` by the index of the term; those after a failure may be missing.
    Returns: the outcome; ``Reward.terms`` holds the values before weighting.
    """
    [outcome] = combine_each(terms, [answers], data_source, may_be_none=may_be_none)
    return outcome


def combine_each(
    terms: Sequence[Term],
    answers: Sequence[Mapping[int, SentAnswer]],
    data_source: str,
    *,
    may_be_none: bool = False,
) -> list[Outcome]:
    """The same for several responses of one data source. Args: answers of each."""
    counting = [(index, term) for index, term in enumerate(terms) if term.counts_for(data_source)]
    if not counting and not may_be_none:
        return [Invalid(NO_REWARD, f"no reward term counts for data source {data_source!r}")] * len(answers)
    return [_sum_of(counting, each) for each in answers]


def _sum_of(counting: Sequence[tuple[int, Term]], answers: Mapping[int, SentAnswer]) -> Outcome:
    total = 0.0
    values: list[tuple[str, float]] = []
    texts: list[tuple[str, str]] = []
    for index, term in counting:
        answer = answers[index]
        if isinstance(answer, float):
            total += term.weight * answer
            values.append((term.name, answer))
            continue
        if isinstance(answer, Invalid):
            return answer
        total += term.weight * answer.value
        values.append((term.name, answer.value))
        if answer.extras:
            values += [(f"{term.name}/{key}", value) for key, value in answer.extras]
        if answer.texts:
            texts += [(f"{term.name}/{key}", text) for key, text in answer.texts]
    if not abs(total) <= LARGEST:  # this form is also true for NaN (inf - inf)
        return Invalid(NOT_FINITE, f"the weighted sum is {total}")
    return Reward(total, tuple(values), tuple(texts))


class RewardTerms:
    """The reward functions of all terms.

    A term's value is a number (True and False count as 1 and 0), or a mapping with the number under "score". Other numbers and
    texts of the mapping are kept under "<term>/<key>" and do not enter the sum. The text "pred" is the answer extracted from
    the response, which majority voting uses.
    """

    def __init__(self, terms: Sequence[Term], *, may_be_none: bool = False, decode: Decode | None = None):
        self.terms = tuple(terms)
        self._may_be_none = may_be_none
        self._decode = decode

    def read(self, group: TrajectoryGroup) -> list[ResponseText]:
        """Return the texts of a group's responses, in order, as far as a term reads them."""
        return response_texts(group, self.terms, self._decode)

    def score(self, group: TrajectoryGroup) -> tuple[Outcome, ...]:
        """Return an outcome per response, in order; a batched term is called once for the group. Bad responses and failing
        graders raise nothing."""
        prompt, responses = group.prompt, self.read(group)
        asked = {
            index: self._call_on_group(index, prompt, responses)
            for index, term in enumerate(self.terms)
            if term.batched and term.counts_for(prompt.data_source)
        }
        return tuple(
            self._outcome(prompt, response, {index: answers[number] for index, answers in asked.items()})
            for number, response in enumerate(responses)
        )

    def _call_on_group(self, index: int, prompt: Prompt, responses: Sequence[ResponseText]) -> list[TermAnswer]:
        def call(ranges: Sequence[range]) -> list[list[TermAnswer] | Invalid]:
            return [
                self.call_batched(
                    index, [prompt] * len(each), [responses[place].read_by(self.terms[index]) for place in each]
                )
                for each in ranges
            ]

        return call_with_bisection(len(responses), call, halve=self.terms[index].halve)

    def score_response(self, prompt: Prompt, response: str) -> Outcome:
        """Score one response to a prompt, when no term is batched and none reads the sequence."""
        return self._outcome(prompt, ResponseText(response), {})

    def _outcome(self, prompt: Prompt, response: ResponseText, batched: Mapping[int, TermAnswer]) -> Outcome:
        try:
            answers = self.call(prompt, response)
        except MemoryError as error:
            return Invalid(MEMORY, str(error))
        return combine(self.terms, {**answers, **batched}, prompt.data_source, may_be_none=self._may_be_none)

    def call(self, prompt: Prompt, response: ResponseText, *, plain_answer: bool = False) -> dict[int, TermAnswer]:
        """Call the terms that are not batched, up to the first failure. Returns: their answers by index.

        Args: ``plain_answer`` gives terms that calculate PLAIN_ANSWER instead of the response, to find out which of the two
            made them exceed a limit.
        Raises: MemoryError, after which the process may lack memory for the next call. Other faults of a response or a grader
            are returned as Invalid.
        """
        answers: dict[int, TermAnswer] = {}
        for index, term in enumerate(self.terms):
            if term.batched or not term.counts_for(prompt.data_source):
                continue
            reward: Any = term.reward
            text = PLAIN_ANSWER if plain_answer and term.calculates else response.read_by(term)
            found = _call_term(term.name, lambda reward=reward, text=text: reward(prompt, text))  # type: ignore[misc]
            answers[index] = answer = found if isinstance(found, Invalid) else _value(found[0], term)
            if isinstance(answer, Invalid):
                break
        return answers

    def call_batched(
        self, index: int, prompts: Sequence[Prompt], responses: Sequence[Any]
    ) -> list[TermAnswer] | Invalid:
        """Call a batched term. Returns: one answer per response; Invalid when the call as a whole failed.

        Raises: MemoryError, as ``call``.
        """
        term = self.terms[index]
        reward: Any = term.reward
        found = _call_term(term.name, lambda: reward(prompts, responses))
        if isinstance(found, Invalid):
            return found
        results = found[0].tolist() if isinstance(found[0], np.ndarray) else found[0]
        if not isinstance(results, (list, tuple)):
            return Invalid(
                WRONG_LENGTH, f"{term.called}: returned {_shown(results)}; a list of {len(responses)} is expected"
            )
        if len(results) != len(responses):
            return Invalid(
                WRONG_LENGTH, f"{term.called}: returned {len(results)} values for {len(responses)} responses"
            )
        return [_value(result, term) for result in results]


def _call_term(name: str, call: Callable[[], Any]) -> tuple[Any] | Invalid:
    """Call a term. Returns: a tuple of its result, or Invalid when it raised. Raises: MemoryError."""
    try:
        return (call(),)
    except NoRewardForSource as error:
        return Invalid(NO_REWARD, f"{name}: {error}")
    except NotScored as error:
        return Invalid(error.reason, f"{name}: {error}")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a grader may fail in any way; it is counted and reported
        described = f"{name}: {_describe(error)}"
        if isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError):
            raise MemoryError(described) from None  # drop the frames, which hold the memory
        return Invalid(EXCEPTION, described)


def _value(result: Any, term: Term) -> TermAnswer:
    if term.first and isinstance(result, (tuple, list)) and result:
        result = result[0]
    if isinstance(result, Mapping) and "score" not in result:
        held = ", ".join(str(key) for key in [*result][:MOST_NAMES]) or "nothing"
        what = f'{term.called}: returned a mapping without "score", which holds {held}; a number is expected there'
        return Invalid(NOT_A_NUMBER, what)
    score = result["score"] if isinstance(result, Mapping) else result
    value = _number(_single(score), term.called)
    if isinstance(value, Invalid):
        return value
    return TermValue(value, tuple(_extras(result, term.name)), tuple(_texts(result)))


def _single(value: Any) -> Any:
    """The number in a tensor or an array of one element, as verl assigns it; anything else as it is."""
    if isinstance(value, Real) or not callable(item := getattr(value, "item", None)):
        return value
    try:
        return item()
    except (TypeError, ValueError, RuntimeError):  # several elements
        return value


def _number(value: Any, name: str) -> float | Invalid:
    if not isinstance(value, (Real, np.bool_)):
        return Invalid(NOT_A_NUMBER, f"{name}: returned {_shown(value)}; a number is expected")
    try:
        number = float(value)
    except OverflowError:  # an integer with more than 308 digits
        number = math.inf
    if not abs(number) <= LARGEST:
        return Invalid(NOT_FINITE, f"{name}: returned {number}")
    return number


def _extras(result: Any, name: str) -> list[tuple[str, float]]:
    """Return the finite numbers beside "score"; other values are dropped."""
    if not isinstance(result, Mapping):
        return []
    numbers = [(str(key), _number(value, name)) for key, value in result.items() if key != "score"]
    return [(key, value) for key, value in numbers if isinstance(value, float)]


def _texts(result: Any) -> list[tuple[str, str]]:
    """Return the texts beside "score", each cut to LONGEST_TEXT characters."""
    if not isinstance(result, Mapping):
        return []
    return [(str(key), value[:LONGEST_TEXT]) for key, value in result.items() if isinstance(value, str)]


def _describe(error: BaseException) -> str:
    """Describe an error in at most 500 characters: some errors quote the whole response."""
    text = str(error) if isinstance(error, PosttrainError) else traceback.format_exception_only(error)[-1].strip()
    return text if len(text) <= 500 else f"{text[:500]}…"


def _shown(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, str):
        return f"the text {value[:80]!r}"
    return f"a {type(value).__name__}"
