"""An event loop in a thread of its own, which waits for servers while the process samples and trains."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    def __init__(self) -> None:
        self._loop = asyncio.SelectorEventLoop()
        threading.Thread(target=self._loop.run_forever, name="rewards-from-servers", daemon=True).start()

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine, from any thread; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end and return its result. Raises: the coroutine's own exceptions."""
        future = self.begin(work)
        try:
            return future.result()
        finally:
            future.cancel()  # when the wait was interrupted


@cache
def background() -> Background:
    """Return the background loop of this process."""
    return Background()


os.register_at_fork(after_in_child=background.cache_clear)  # a fork does not copy threads
