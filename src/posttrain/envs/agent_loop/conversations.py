"""Conversations of an agent loop: which one a request continues, and which sampled tokens its output holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Follows:
    """The tokens that a request adds to a conversation."""

    keeps: int  # tokens of the last response that stay
    added: tuple[int, ...]  # tokens behind them


@dataclass(slots=True)
class Conversation:
    """The tokens of one conversation, and the places of those that were sampled."""

    number: int
    ids: list[int]  # what was read and answered so far
    first: int  # tokens of its first request
    context: int = 0  # tokens of its newest request; behind them stands the response
    sampled: list[bool] = field(default_factory=list)  # of every token
    waits: bool = True  # for the answer to its newest request

    def copy(self) -> Conversation:
        return replace(self, ids=[*self.ids], sampled=[*self.sampled])

    def follows(self, ids: Sequence[int]) -> Follows | None:
        """Return what a request adds; None where it does not begin with the conversation and a part of its last response, or adds
        nothing."""
        if self.waits or list(ids[: self.context]) != self.ids[: self.context]:
            return None
        keeps = _alike(self.ids[self.context :], ids[self.context :])
        added = tuple(ids[self.context + keeps :])
        return Follows(keeps, added) if keeps and added else None

    def asked(self, ids: Sequence[int], follows: Follows) -> None:
        """Take a request that continues the conversation."""
        del self.ids[self.context + follows.keeps :], self.sampled[self.context + follows.keeps :]
        self.ids += follows.added
        self.sampled += [False] * len(follows.added)
        self.context, self.waits = len(ids), True

    def answered(self, response: Sequence[int]) -> None:
        """Take the response to the newest request."""
        self.ids += response
        self.sampled += [True] * len(response)
        self.waits = False


@dataclass(frozen=True, slots=True)
class Learned:
    """The part of an episode that is trained."""

    by_line: dict[int, list[bool]]  # of a conversation's tokens behind its first request, those that are trained
    unsampled: int  # tokens that the output marks as the model's own, and that the sampler did not give


def begun(number: int, ids: Sequence[int]) -> Conversation:
    """A conversation whose first request holds these tokens."""
    return Conversation(number, list(ids), len(ids), len(ids), [False] * len(ids))


def learned(
    conversations: Sequence[Conversation], prompt: Sequence[int], response: Sequence[int], mask: Sequence[int]
) -> Learned:
    """Find the tokens that an output marks as the model's own among those that were sampled, place by place.

    A conversation counts as far as it and the output begin alike: what stands behind a branch is not trained.
    """
    output = [*prompt, *response]
    wanted = [False] * len(prompt) + [bool(each) for each in mask]
    covered = [False] * len(output)
    by_line = {}
    for each in conversations:
        common = _alike(each.ids, output)
        marks = [place < common and each.sampled[place] and wanted[place] for place in range(each.first, len(each.ids))]
        for place, mark in enumerate(marks, each.first):
            if mark:
                covered[place] = True
        if any(marks) or (common > each.first and any(each.sampled[:common])):
            by_line[each.number] = marks
    missing = sum(want and not there for want, there in zip(wanted, covered, strict=True))
    return Learned(by_line, missing)


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of places from the first on at which two sequences have the same tokens."""
    length = min(len(one), len(other))
    return next((place for place in range(length) if one[place] != other[place]), length)
