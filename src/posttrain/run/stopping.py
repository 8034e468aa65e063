"""Stopping on request: the first signal asks, the second leaves, and a clock watches over the time between."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, ClassVar, Self

from posttrain.run.early_stop import heard

# Batch systems warn with SIGTERM or SIGUSR1
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class StepAbandoned(Exception):
    """A stop was requested before the first update of a step: the step is left, and done again when the run is resumed."""


class GraceOver(BaseException):
    """The grace time after the first signal has passed. Like KeyboardInterrupt it comes at any line, so it is no Exception,
    which whoever is in between might catch."""


class StopSignal:
    """While entered, SIGINT, SIGTERM, SIGUSR1 and SIGHUP (a closed terminal, unless under nohup) set ``requested``: the run
    leaves its step, or finishes it when the weights are being updated, saves and ends. A second one ends it at once. In another
    thread than the main one, which alone hears signals, it hears none.

    Args: ``grace_s`` after the first signal GraceOver is raised, unless a checkpoint is being written just then.
    """

    # Seconds within which a second signal is taken for the first one. Under --restarts a batch system signals the supervisor,
    # which hands it on, and this process itself.
    echo_s: ClassVar[float] = 0.0

    def __init__(self, grace_s: float = 60.0) -> None:
        self.name = ""
        self.grace_s = grace_s
        self._saving = False
        self._asked_at = 0.0
        self._before: dict[signal.Signals, Any] = {}
        self._telling: threading.Thread | None = None

    @property
    def requested(self) -> bool:
        return bool(self.name)

    def check(self) -> None:
        """Raises: StepAbandoned when a stop was requested. To be called where a step can still be left."""
        if self.requested:
            raise StepAbandoned

    @contextmanager
    def saving(self) -> Iterator[None]:
        """The grace time is for what happens inside, so its end does not break it off."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in SIGNALS:
            # nohup: the terminal may close
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._request)
        self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._time_is_over)
        if name := heard():
            self.name = name
            signal.setitimer(signal.ITIMER_REAL, self.grace_s)
        return self

    def __exit__(self, *_: object) -> None:
        if self._telling is not None:
            self._telling.join(timeout=1.0)
        if not self._before:
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            if time.monotonic() - self._asked_at < self.echo_s:
                return
            raise KeyboardInterrupt
        self._asked_at = time.monotonic()
        self.name = signal.Signals(number).name
        signal.setitimer(signal.ITIMER_REAL, self.grace_s)
        text = f"{self.name}: saving and stopping, in at most {self.grace_s:g} s; again to stop at once, unsaved\n"
        # A thread: the handler may have interrupted whoever holds the locks of the progress display.
        telling = threading.Thread(target=_tell, args=(text,), daemon=True)
        telling.start()  # a second signal may come inside
        self._telling = telling

    def _time_is_over(self, number: int, frame: FrameType | None) -> None:
        if not self._saving:
            raise GraceOver


@contextmanager
def held_back() -> Iterator[None]:
    """SIGINT is handled at the end of what happens inside, and not in its middle. In another thread than the main one, where
    no signal is heard, and where no Python function handles it, this changes nothing."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    heard: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: heard.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if heard:
            handler(signal.SIGINT, heard[0])


def _tell(text: str) -> None:
    """Write to standard error: above a live display of rich, which takes its place; else below the ``^C`` of the key."""
    with suppress(OSError, ValueError):  # closed
        sys.stderr.write(text if hasattr(sys.stderr, "rich_proxied_file") else f"\n{text}")
        sys.stderr.flush()
