"""Stopping on request: the first signal asks, the second leaves."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType
from typing import Any, Self


class StopSignal:
    """While entered, SIGINT, SIGTERM and SIGHUP (a closed terminal) set ``requested``: the run saves after its step and ends.
    A second one ends it at once."""

    def __init__(self) -> None:
        self.name = ""
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        return bool(self.name)

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
        # Written past the progress display and its locks, which this handler may have interrupted.
        with suppress(OSError):
            os.write(2, f"\n{self.name}: saving after this step; again to stop at once, unsaved\n".encode())
