"""A worker's process, its state, its end and its log, on the node where it runs. Ray has started it. Standard library only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from posttrain.processes import descendants, proc

TAIL_BYTES = 65536  # of a log that are kept of a lost worker
LINES_BEFORE_FAULT = 3  # what a library says before it aborts
LINES_OF_FAULT = 16  # faulthandler's report: the thread that crashed comes first, its innermost call first


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
        """A description for people."""
        return {"pid": self.pid, "host": self.host, "node": self.node}


def state(process: WorkerProcess) -> str:
    """State of the process: ``running``, ``stopped`` (by SIGSTOP, or a debugger) or ``gone``."""
    return proc.state(process.pid, process.started)


def end(process: WorkerProcess) -> None:
    """Kill it, also when it is stopped, and delete its log."""
    if state(process) != "gone":
        descendants.kill([process.pid])
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


def tail(path: str) -> str:
    """The last 64 KiB of a log; empty when there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def telling_lines(text: str, count: int) -> list[str]:
    """The last lines of a log. Of a crash, the beginning of faulthandler's report: its end lists threads that wait."""
    lines = text.splitlines()
    faults = [number for number, line in enumerate(lines) if line.startswith("Fatal Python error")]
    if not faults:
        return lines[-count:]
    return lines[max(0, faults[-1] - LINES_BEFORE_FAULT) : faults[-1] + LINES_OF_FAULT]
