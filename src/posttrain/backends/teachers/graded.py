"""The log-probs in a teaching server's answer, checked: an answer that cannot be right is refused, and never learned from."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.backends.serving.protocol import UnusableAnswer, field_of
from posttrain.libraries.json_http import short

FIX = "the server must answer /v1/completions with prompt_logprobs, as vLLM does"
LOWEST = -1e4  # nats; vLLM reports -9999 for a token that cannot come
HIGHEST = 1e-3  # nats; rounding may put a certain token a little above 0
MASS = 1.01  # largest sum of listed probabilities, with rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class GradedToken:
    """One token of the prompt with the log-probs that the server lists at its place, nats by token id."""

    token: int
    listed: Mapping[int, float]

    @property
    def logprob(self) -> float:
        return self.listed[self.token]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerReader:
    """Reader of one server's answers."""

    server: str  # in messages
    vocabulary: int  # the student's tokens have ids below this

    def read(self, answer: Any, tokens: Sequence[int], wanted: Sequence[int]) -> list[GradedToken]:
        """Return the wanted places of a prompt. Raises: UnusableAnswer."""
        places = field_of(answer, "choices", 0, "prompt_logprobs")
        if not isinstance(places, list) or len(places) != len(tokens):
            given = len(places) if isinstance(places, list) else "no"
            # An error may come with the status 200.
            said = field_of(answer, "error", "message") or field_of(answer, "message")
            said = f" and said: {short(said)}" if isinstance(said, str) else ""
            raise self._unusable(f"gave {given} prompt_logprobs for {len(tokens)} tokens{said}")
        return [self._graded(tokens[number], places[number], number) for number in wanted]

    def top(self, graded: GradedToken, k: int) -> list[tuple[int, float]]:
        """Return the k most likely tokens that the student knows, with their log-probs. Raises: UnusableAnswer."""
        # The prompt's own token is listed beside the k most likely ones.
        known = [(token, value) for token, value in graded.listed.items() if token < self.vocabulary]
        if len(known) < k:
            what = f"gave {len(graded.listed)} of the {k} most likely tokens"
            unknown = [token for token in graded.listed if token >= self.vocabulary]
            if unknown:
                what += f", and the student, whose tokens end at {self.vocabulary - 1}, does not know {unknown[0]}"
            raise self._unusable(what)
        return sorted(known, key=lambda each: -each[1])[:k]

    def _graded(self, token: int, place: Any, number: int) -> GradedToken:
        """Read {"17": {"logprob": -0.5, …}, …}."""
        if not isinstance(place, Mapping):
            raise self._unusable(f"gave no log-probs at token {number} of a prompt")
        listed: dict[int, float] = {}
        for name, entry in place.items():
            listed[self._id(name)] = self._logprob(field_of(entry, "logprob"), name)
        if token not in listed:
            raise self._unusable(f"gave no log-prob of token {token}, which is token {number} of a prompt")
        mass = math.fsum(math.exp(value) for value in listed.values())
        if mass > MASS:
            raise self._unusable(f"gave probabilities that sum to {mass:.3g} at token {number} of a prompt")
        best = max(listed.values())
        if best < -math.log(2 * self.vocabulary):  # the teacher may have tokens besides
            what = (
                f"gave {best:g} as the largest log-prob at token {number} of a prompt, and listed the most likely token"
            )
            raise self._unusable(what)
        return GradedToken(token=token, listed=listed)

    def _id(self, name: Any) -> int:
        if isinstance(name, str) and name.isascii() and name.isdigit() and len(name) < 10:
            return int(name)
        raise self._unusable(f"listed {str(name)[:40]!r} in place of a token id")

    def _logprob(self, value: Any, name: str) -> float:
        if type(value) in (int, float) and LOWEST <= value <= HIGHEST:
            return float(value)
        raise self._unusable(f"gave {json.dumps(value)[:40]} as the log-prob of token {name}")

    def _unusable(self, what: str) -> UnusableAnswer:
        return UnusableAnswer(f"the {self.server} {what}; {FIX}")
