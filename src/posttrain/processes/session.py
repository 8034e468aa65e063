"""A process in a session of its own, watched by threads until it ends, and killed with everything that it has started."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO

from posttrain.processes import descendants, proc

LAST_WORDS_S = 1.0  # for output to arrive, after the process has ended
LAST_LINES = 20  # of its output, kept to say why it failed


class SessionProcess:
    """A child of this process that leads a session, with a pipe of lines that it writes.

    ``watch`` calls ``on_end`` with its last lines and its exit code (minus the signal's number), once, in another thread.
    """

    def __init__(self, pid: int, output: IO[str]):
        self._pid = pid
        self._output = output
        self._code: int | None = None
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._threads: list[threading.Thread] = []

    def watch(self, on_end: Callable[[Sequence[str], int], None]) -> None:
        def read() -> None:
            with suppress(ValueError):  # closed while it was read
                self._lines.extend(self._output)

        def wait() -> None:
            _, status = os.waitpid(self._pid, 0)
            self._code = os.waitstatus_to_exitcode(status)
            reader.join(LAST_WORDS_S)
            on_end(list(self._lines), self._code)

        reader = threading.Thread(target=read, name="process-output", daemon=True)
        self._threads = [reader, threading.Thread(target=wait, name="process-watcher", daemon=True)]
        for thread in self._threads:
            thread.start()

    def kill(self) -> None:
        """Returns when it is gone, with everything that it has started."""
        below = proc.descendants(self._pid) if self._code is None else []
        descendants.kill_group(self._pid)
        descendants.kill(below)
        for thread in self._threads:
            thread.join()
        self._output.close()
