"""Signals that ask for a stop before the first step: while libraries are imported, data is read, models are loaded.

Nothing is saved then, and starting again loses nothing, so the command ends at once, with the exit code of an interrupted run.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from contextlib import suppress
from types import FrameType

# SIGINT ends a command at once by KeyboardInterrupt, whatever the command is.
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
AT_ONCE = 130  # exit code of a process that a signal, often the second one, ended without waiting for anything
RETRY_S = 0.02
_heard: list[str] = []


class StoppedEarly(BaseException):
    """A stop was requested outside of the steps. Like KeyboardInterrupt it comes at any line."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"stopped by {self.name} outside of the steps; start it again to begin or to resume"


def heed_signals() -> None:
    """Make these signals raise StoppedEarly. ``StopSignal`` takes their place for the steps.

    SIGHUP stays ignored under nohup. A process that was forked from this one ends by them as usual.
    """
    own = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != own:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not put_off(number, frame):
            for one in SIGNALS:  # a second one must not break off the tidying up; SIGINT does
                signal.signal(one, signal.SIG_IGN)
            name = signal.Signals(number).name
            _heard.append(name)
            with suppress(OSError):
                os.write(2, f"\n{name}: stopping\n".encode())
            raise StoppedEarly(name)

    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)


def heard() -> str:
    """The name of the signal that asked for a stop; empty when there was none. A library may have caught the exception."""
    return _heard[0] if _heard else ""


def put_off(number: int, frame: FrameType | None) -> bool:
    """Send a signal again a moment later, and return True, where an exception of its handler would be lost: inside a ``__del__``
    or a callback of the garbage collector, where Python prints the exception and continues."""
    callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code in callbacks:
            timer = threading.Timer(RETRY_S, os.kill, (os.getpid(), number))
            timer.daemon = True
            timer.start()
            return True
        frame = frame.f_back
    return False
