"""Replies to many calls that were submitted together: one object for all of them, because a future per call costs the caller
more than most calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
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
        self._complete = threading.Event()
        if not count:
            self._complete.set()

    def put(self, number: int, reply: R) -> None:
        with self._lock:
            self._found[number] = reply
            self._missing -= 1
            watcher, missing = self._watcher, self._missing
        if not missing:
            self._complete.set()
        if watcher:
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
        self._complete.wait()
        return cast("list[R]", self._found)
