"""Calls that wait for a worker, and how many of them cross to it together."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from posttrain.processes.replies import Replies

R = TypeVar("R")

MOST_TOGETHER = 128
SHORT_S = 0.005  # of calls that were made together: next time there may be twice as many


@dataclass(slots=True, eq=False)
class WaitingCalls(Generic[R]):
    """Neighbouring calls of one submission."""

    requests: Sequence[bytes]  # {"call": …, "seed": …} each
    shared: bytes  # JSON of the entries that they have alike; "null": none
    replies: Replies[R]
    first: int = 0  # number of the first of them in the submission
    alone: bool = False  # one call, after something happened to the worker that had it with others

    def __len__(self) -> int:
        return len(self.requests)

    def part(self, start: int, end: int, *, alone: bool = False) -> WaitingCalls[R]:
        """Return the calls from ``start`` up to ``end``, counted from the first."""
        return replace(self, requests=self.requests[start:end], first=self.first + start, alone=alone)

    def answer(self, replies: Sequence[R]) -> None:
        """Hand over the replies to the first of them."""
        self.replies.put(self.first, replies)


def frame_of(calls: Sequence[WaitingCalls[R]]) -> bytes:
    """Write calls as worker.py reads them: [[shared, [request, …]], …], in their order."""
    return b"[" + b",".join(b"[%b,[%b]]" % (each.shared, b",".join(each.requests)) for each in calls) + b"]"


class Waiting(Generic[R]):
    """A queue in the order of submission. Short calls are taken together, long ones one by one, as their time shows."""

    def __init__(self, workers: int):
        self._workers = workers
        self._calls: deque[WaitingCalls[R]] = deque()
        self._count = 0  # of calls in them
        self._changed = threading.Condition()
        self._together = 1
        self._closed = False

    def put(self, calls: WaitingCalls[R]) -> bool:
        """Add calls. Returns: False when the queue is closed."""
        with self._changed:
            if not self._closed and calls:
                self._calls.append(calls)
                self._count += len(calls)
                self._changed.notify(len(calls))
            return not self._closed

    def take(self) -> list[WaitingCalls[R]]:
        """Wait for calls, and leave as many to each of the other workers. Returns: none when the queue is closed."""
        with self._changed:
            while not self._calls and not self._closed:
                self._changed.wait()
            if self._closed:
                return []
            left = min(self._together, -(-self._count // self._workers))
            taken = [self._pop(left)]
            while not taken[0].alone and (left := left - len(taken[-1])) and not self._calls[0].alone:
                taken.append(self._pop(left))
            return taken

    def _pop(self, most: int) -> WaitingCalls[R]:
        """The next calls of one submission, at most so many."""
        calls = self._calls.popleft()
        if len(calls) > most:
            self._calls.appendleft(calls.part(most, len(calls)))
            calls = calls.part(0, most)
        self._count -= len(calls)
        return calls

    def answered(self, calls: Sequence[WaitingCalls[R]], count: int, seconds: float) -> Sequence[WaitingCalls[R]]:
        """Put back what was not answered: all but the first ``count`` calls. Returns: those, when the queue is closed."""
        rest = _beyond(calls, count)
        with self._changed:
            if rest:
                self._together = 1
            elif seconds < SHORT_S:
                self._together = min(2 * self._together, MOST_TOGETHER)
            if self._closed:
                return rest
            if not count:
                rest = [each.part(place, place + 1, alone=True) for each in rest for place in range(len(each))]
            self._calls.extendleft(reversed(rest))
            self._count += sum(map(len, rest))
            self._changed.notify(sum(map(len, rest)))
            return ()

    def close(self) -> list[WaitingCalls[R]]:
        """Let nothing more be taken. Returns: what waited."""
        with self._changed:
            self._closed = True
            left = list(self._calls)
            self._calls.clear()
            self._changed.notify_all()
            return left


def _beyond(calls: Sequence[WaitingCalls[R]], count: int) -> list[WaitingCalls[R]]:
    """The calls behind the first ``count``."""
    rest = []
    for each in calls:
        if count < len(each):
            rest.append(each.part(count, len(each)) if count else each)
        count = max(count - len(each), 0)
    return rest
