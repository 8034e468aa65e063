"""An event loop in a thread of its own: servers are waited for there while this process samples and trains."""

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
        """Start it, from any thread; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Start it and wait. Raises whatever it raises."""
        future = self.begin(work)
        try:
            return future.result()
        finally:
            future.cancel()  # where waiting was interrupted


@cache
def background() -> Background:
    """That of this process."""
    return Background()


os.register_at_fork(after_in_child=background.cache_clear)  # threads stay behind
