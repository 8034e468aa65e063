"""Entry point of the ``posttrain`` command: Ctrl-C before the first step ends it, at any line, without a traceback."""

from __future__ import annotations

import gc
import os
import signal
import threading
from types import FrameType

RETRY_S = 0.02


def main() -> None:
    """Import the commands and run the requested one."""
    before = signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # the system ends the process; there is nothing to tidy up yet
    from posttrain.cli.app import main as run

    signal.signal(signal.SIGINT, interrupt if before is signal.default_int_handler else before)
    run()


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, except inside a ``__del__`` or a callback of the garbage collector, where Python would print the
    exception and continue.

    There the signal is sent again a moment later.
    """
    callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code in callbacks:
            timer = threading.Timer(RETRY_S, os.kill, (os.getpid(), number))
            timer.daemon = True
            timer.start()
            return
        frame = frame.f_back
    raise KeyboardInterrupt
