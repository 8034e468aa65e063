"""Calls that wait for a worker, and how many of them cross to it together."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, TypeVar

from posttrain.processes.replies import Replies

R = TypeVar("R")

MOST_TOGETHER = 128
SHORT_S = 0.005  # of calls that were made together: next time there may be twice as many


@dataclass(slots=True, eq=False)
class WaitingCall(Generic[R]):
    request: bytes  # {"call": …, "seed": …}
    shared: bytes  # JSON of the entries that many calls have alike, one object for all of them; "null": none
    replies: Replies[R]
    number: int  # of the call among those
    alone: bool = False  # after something happened to the worker that had it with others

    def answer(self, reply: R) -> None:
        self.replies.put(self.number, reply)


def frame_of(calls: Sequence[WaitingCall[R]]) -> bytes:
    """Write calls as worker.py reads them: [[shared, [request, …]], …], in their order, what neighbours share once."""

    def parts() -> Iterator[bytes]:
        for _, run in groupby(calls, key=lambda call: id(call.shared)):
            alike = list(run)
            yield b"[%b,[%b]]" % (alike[0].shared, b",".join(call.request for call in alike))

    return b"[" + b",".join(parts()) + b"]"


class Waiting(Generic[R]):
    """A queue in the order of submission. Short calls are taken together, long ones one by one, as their time shows."""

    def __init__(self, workers: int):
        self._workers = workers
        self._calls: deque[WaitingCall[R]] = deque()
        self._changed = threading.Condition()
        self._together = 1
        self._closed = False

    def put(self, calls: Sequence[WaitingCall[R]]) -> bool:
        """Add calls. Returns: False when the queue is closed."""
        with self._changed:
            if not self._closed:
                self._calls.extend(calls)
                self._changed.notify(len(calls))
            return not self._closed

    def take(self) -> list[WaitingCall[R]]:
        """Wait for calls, and leave as many to each of the other workers. Returns: none when the queue is closed."""
        with self._changed:
            while not self._calls and not self._closed:
                self._changed.wait()
            if self._closed:
                return []
            taken = [self._calls.popleft()]
            most = min(self._together, -(-(len(self._calls) + 1) // self._workers))
            while len(taken) < most and not taken[0].alone and not self._calls[0].alone:
                taken.append(self._calls.popleft())
            return taken

    def answered(self, calls: Sequence[WaitingCall[R]], count: int, seconds: float) -> Sequence[WaitingCall[R]]:
        """Put back what was not answered: all but the first ``count``. Returns: those calls, when the queue is closed."""
        rest = calls[count:]
        with self._changed:
            if rest:
                self._together = 1
            elif seconds < SHORT_S:
                self._together = min(2 * self._together, MOST_TOGETHER)
            if self._closed:
                return rest
            for call in rest:
                call.alone = not count
            self._calls.extendleft(reversed(rest))
            self._changed.notify(len(rest))
            return ()

    def close(self) -> list[WaitingCall[R]]:
        """Let nothing more be taken. Returns: what waited."""
        with self._changed:
            self._closed = True
            left = list(self._calls)
            self._calls.clear()
            self._changed.notify_all()
            return left
