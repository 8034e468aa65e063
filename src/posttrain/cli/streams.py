"""Standard streams that are there and last: a run does not depend on who reads its messages."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class LastingOutput(io.FileIO):
    """An open descriptor for messages. When it cannot be written any more (its reader has ended, the terminal is gone, the disk
    of a log file is full), it becomes that of the null device: nothing but messages is lost, and the process continues."""

    def write(self, data: Any, /) -> int | None:  # type: ignore[override]  # None: a pipe that is full and must not block
        try:
            return super().write(data)
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return memoryview(data).nbytes


def keep_streams() -> None:
    """Open the null device for standard streams that are closed, and make standard error last.

    A file that is opened later would otherwise get the number of a closed stream, and libraries would print into it. Standard
    output stays as it is: a command that cannot write its result must fail.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
        if getattr(sys, name) is None:
            stream = os.fdopen(number, mode, closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    messages = sys.stderr
    if messages is not sys.__stderr__ or messages is None:
        return  # whoever calls this from Python reads the messages
    lasting = io.BufferedWriter(LastingOutput(2, "wb", closefd=False))
    sys.stderr = io.TextIOWrapper(lasting, encoding=messages.encoding, errors="backslashreplace", line_buffering=True)
