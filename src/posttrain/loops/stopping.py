"""Stopping on request: the first signal asks, the second leaves."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any, Self


class StopSignal:
    """While entered, SIGINT and SIGTERM set ``requested`` (the run saves after its step and ends); a second one ends at once."""

    def __init__(self) -> None:
        self.name = ""
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        return bool(self.name)

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
