"""A worker that passes calls on to many ranks of a large group, so that the driver sends one message for all of them.

    driver --- one call ---> relay --- a call each ---> its ranks
           <-- one answer --       <-- an answer each --

A relay has no models. It is supervised as every worker is, and its end is the end of the run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.backends.runtime.ray.cluster import Calls, WorkerDied
from posttrain.backends.runtime.ray.worker import Failure, Worker

LOOK_S = 0.5  # at calls of which some are open
SETTLE_S = 4.0  # after an error of one worker, in which another is found to be its cause

# Number of the rank among the relay's, the method, its arguments
PassedCall = tuple[int, str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Dead:
    """Stands for an answer: the call found the worker dead."""

    why: str  # as WorkerDied has it


@dataclass(frozen=True, slots=True)
class Open:
    """Stands for an answer that had not come when another worker died or failed, which ends the call of all."""


class Relay(Worker):
    """See the module."""

    def take_ranks(self, handles: Sequence[Any]) -> None:
        """Take the handles of its ranks."""
        self._ranks = list(handles)

    def pass_on(self, calls: Sequence[PassedCall]) -> list[Any]:
        """Call ranks, and wait for them. Returns: an answer for each call: a result, a Failure, Dead or Open."""
        asked = Calls()
        waiting = {asked.call(self._ranks[rank], method, *given): at for at, (rank, method, given) in enumerate(calls)}
        answers: list[Any] = [Open()] * len(calls)
        failed_at: float | None = None
        while waiting:
            for promise in asked.ready(list(waiting), LOOK_S, whole=True):
                found = _answer(asked, promise)
                answers[waiting.pop(promise)] = found
                if isinstance(found, Dead) or (isinstance(found, Failure) and found.kind):
                    return answers
                if isinstance(found, Failure):
                    failed_at = failed_at or time.monotonic()
            if failed_at and time.monotonic() - failed_at > SETTLE_S:
                break
        return answers


def _answer(asked: Calls, promise: Any) -> Any:
    """The value of a fulfilled promise."""
    try:
        return asked.value(promise, LOOK_S)
    except WorkerDied as died:
        return Dead(died.why)


@dataclass(frozen=True, slots=True, eq=False)
class PassedOn:
    """A promise of the answers of several workers through their relay."""

    promise: Any
    relay: Any  # watch.Member
    members: tuple[Any, ...]  # in the order of the answers
