"""What a node of the cluster can say about a worker's process, and do to it. Standard library only; runs on the worker's node."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TAIL_BYTES = 4096  # of a log that are looked at for its last lines


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProcess:
    """A worker as its node knows it."""

    pid: int
    started: int  # clock ticks after the machine's start: a number used again belongs to another process
    node: str  # Ray's id of the node
    host: str  # the node's address
    log: str  # file on the node that holds what the worker prints

    @property
    def place(self) -> dict[str, str | int]:
        """For people."""
        return {"pid": self.pid, "host": self.host, "node": self.node}


def started(pid: int) -> int | None:
    """When a process began, in clock ticks after the machine's start; None when there is none, or nothing but its exit code."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def state(process: WorkerProcess) -> str:
    """How it is: ``running`` (whatever it does), ``stopped`` (by SIGSTOP, or a debugger) or ``gone``."""
    fields = _stat(process.pid)
    if fields is None or fields[0] in "ZX" or int(fields[19]) != process.started:
        return "gone"
    return "stopped" if fields[0] in "Tt" else "running"


def end(process: WorkerProcess) -> None:
    """Kill it, also when it is stopped, and take its log away."""
    if state(process) != "gone":
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)
    Path(process.log).unlink(missing_ok=True)


def read_log(path: str, start: int, limit: int = 1 << 20) -> tuple[list[str], int]:
    """The whole lines after byte ``start``, and where they end; at most about ``limit`` bytes, so that a flood comes in parts."""
    try:
        with open(path, "rb") as file:
            file.seek(start)
            text = file.read(limit)
    except FileNotFoundError:
        return [], start
    end_of_last = text.rfind(b"\n") + 1 or (len(text) if len(text) == limit else 0)
    return text[:end_of_last].decode(errors="replace").splitlines(), start + end_of_last


def last_lines(path: str, count: int = 10) -> list[str]:
    """The end of a log; empty when there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except FileNotFoundError:
        return []


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name, state first; None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()
