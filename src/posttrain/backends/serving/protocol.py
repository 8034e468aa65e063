"""Interface of one kind of server: requests and answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

from posttrain.errors import RunStopped
from posttrain.records.trajectories import SamplingParams


@dataclass(frozen=True, slots=True)
class SampledResponse:
    """A response as the server reports it."""

    token_ids: list[int]
    logprobs: list[float]
    finish: str  # "stop", "length", or another word of the server
    # Of the prompt's second token to its last, when asked for
    prompt_logprobs: list[float] = field(default_factory=list)
    # [tokens of prompt and response but the last, layers of the model, chosen], where the server reports them
    experts: NDArray[Any] | None = None


class UnusableAnswer(RunStopped):
    """A server's answer lacks what training needs; a retry would give the same."""


class ServerProtocol(Protocol):
    """The request and answer format of one kind of server."""

    health_path: str
    gives_prompt_logprobs: bool

    def request(self, token_ids: Sequence[int], sampling: SamplingParams, seed: int) -> tuple[str, dict[str, Any]]:
        """Return the path and JSON body of the request for one response."""
        ...

    def read(self, answer: Any) -> SampledResponse:
        """Parse an answer. Raises: UnusableAnswer when token ids or log-probs are missing."""
        ...


def exact(answer_of: str, token_ids: Any, logprobs: Any, *, fix: str) -> tuple[list[int], list[float]]:
    """Check token ids and their log-probs, which must be equally many: text is never re-tokenised, because other tokens can
    spell it.

    Raises: UnusableAnswer.
    """
    if not isinstance(token_ids, list) or not all(type(token) is int and token >= 0 for token in token_ids):
        raise UnusableAnswer(f"{answer_of} has no token ids, and text is not tokenised again; {fix}")
    if not isinstance(logprobs, list) or not all(isinstance(value, int | float) for value in logprobs):
        raise UnusableAnswer(f"{answer_of} has no log-probs of its tokens; {fix}")
    if len(token_ids) != len(logprobs):
        raise UnusableAnswer(f"{answer_of} has {len(token_ids)} tokens and {len(logprobs)} log-probs")
    if not all(math.isfinite(value) and value < 1e-3 for value in logprobs):
        raise UnusableAnswer(f"{answer_of} has a log-prob that is not finite or above 0")
    return token_ids, [float(value) for value in logprobs]


def field_of(value: Any, *path: str | int) -> Any:
    """Return the value at a path in a JSON value, or None."""
    for part in path:
        if isinstance(part, int):
            value = value[part] if isinstance(value, list) and part < len(value) else None
        else:
            value = value.get(part) if isinstance(value, Mapping) else None
    return value
