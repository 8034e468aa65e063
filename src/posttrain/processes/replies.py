"""Replies to many calls that were submitted together: one object for all of them, because a future per call costs the caller
more than most calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, cast

R = TypeVar("R")

OnReply = Callable[[int, R], None]  # the number of a call among those submitted together, and its reply


class Replies(Generic[R]):
    """The replies to ``count`` calls. The threads of several workers may put them, in any order, each once."""

    def __init__(self, count: int):
        self._lock = threading.Lock()
        self._found: list[R | None] = [None] * count
        self._missing = count
        self._watcher: OnReply[R] | None = None
        self._complete: threading.Event | None = None  # made by whoever has to wait: it takes longer than a short call

    def put(self, first: int, replies: Sequence[R]) -> None:
        """Take the replies to neighbouring calls, of which the first has this number."""
        with self._lock:
            self._found[first : first + len(replies)] = replies
            self._missing -= len(replies)
            watcher, missing, complete = self._watcher, self._missing, self._complete
        if complete and not missing:
            complete.set()
        if watcher:
            for number, reply in enumerate(replies, first):
                watcher(number, reply)

    def watch(self, watcher: OnReply[R]) -> None:
        """Call ``watcher`` once for every reply, with those that are here at once. For one watcher."""
        with self._lock:
            self._watcher = watcher
            here = [(number, reply) for number, reply in enumerate(self._found) if reply is not None]
        for number, reply in here:
            watcher(number, reply)

    def all(self) -> list[R]:
        """Wait for the last reply. Returns: all of them, in the order of the calls."""
        with self._lock:
            self._complete = complete = self._complete or (threading.Event() if self._missing else None)
        if complete:
            complete.wait()
        return cast("list[R]", self._found)
