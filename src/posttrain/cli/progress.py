"""Progress of long work: a bar on a terminal, a line at intervals elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINES = 10  # about the most lines without a terminal
QUIET_S = 1.0  # work shorter than this prints no line


class WorkProgress:
    """Shows the progress of work counted in ``unit`` (rows), from ``begin`` to the end of its ``with`` block.

    Args: ``detail`` names a second count whose rate is shown (tokens); with "" the rate of the units is shown.
    """

    def __init__(self, title: str, *, unit: str, detail: str = "", stream: TextIO | None = None):
        self._stream = stream if stream is not None else sys.stdout
        self._title, self._unit, self._detail = title, unit, detail
        self._total = self._begun_with = self._done = self._shown = self._details = 0
        self._start = time.monotonic()
        self._bar: Progress | None = None

    def begin(self, total: int, done: int = 0) -> None:
        """Start the display: ``total`` units of work, of which ``done`` are finished."""
        self._total = total
        self._begun_with = self._done = self._shown = done
        self._start = time.monotonic()
        if self._stream.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                console=Console(file=self._stream, highlight=False, markup=False, emoji=False),
            )
            self._task = self._bar.add_task(self._title, total=total, completed=done, rate="")
            self._bar.start()

    def advance(self, units: int, details: int = 0) -> None:
        self._done += units
        self._details += details
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, rate=self._rate())
        elif self._due():
            self._shown = self._done
            print(
                f"{self._title}: {self._done} of {self._total} {self._unit}, {self._rate()}",
                file=self._stream,
                flush=True,
            )

    def _due(self) -> bool:
        late = time.monotonic() - self._start >= QUIET_S
        return late and (self._done - self._shown) * LINES >= self._total

    def _rate(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        if self._detail:
            return f"{self._details / seconds:,.0f} {self._detail}/s"
        return f"{(self._done - self._begun_with) / seconds:,.0f} {self._unit}/s"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
