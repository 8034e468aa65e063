"""Running a program in a box, from any process and any thread."""

from __future__ import annotations

import atexit
import os
import select
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from posttrain.processes import start
from posttrain.processes.frames import PipeClosed
from posttrain.sandbox.messages import read_message, write_message
from posttrain.sandbox.walls import BoxLimits

# How a run ended: by itself, by a signal (a crash, or the kernel's limit of CPU time), or because it passed a limit.
Ended = Literal["exit", "signal", "timeout", "output", "threads"]

_COMMAND = start.lean_command("posttrain.sandbox.warden")
# What a warden may take beyond the program's own time before it counts as lost.
_PATIENCE_S = 60.0


class BoxError(Exception):
    """A box could not be made or was lost, so nothing is known about the program. ``wall`` names the wall that failed."""

    def __init__(self, wall: str, reason: str):
        self.wall = wall
        super().__init__(f"{wall}: {reason}" if wall else reason)


class _Gone(BoxError):
    """The process that watches the box has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    source: str  # Python
    stdin: str = ""
    function: str | None = (
        None  # call this function, or this method of its class Solution, instead of running it as a script
    )
    arguments: tuple[Any, ...] = ()  # of the function; what JSON can hold
    readable: tuple[str, ...] = ()  # files of the host that it may read, under their own absolute names


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxRun:
    """The end of a program. ``result`` is the return value of the function as JSON; the program controls all three texts."""

    ended: Ended
    code: int | None  # exit code; minus the signal's number; None when it was killed at a limit
    stdout: bytes = field(repr=False)
    stderr: bytes = field(repr=False)
    result: bytes = field(repr=False)
    wall_s: float
    waited_s: float  # of that, ready to run and waiting for a core

    @property
    def finished(self) -> bool:
        """True when it ended by itself, without an error."""
        return self.ended == "exit" and self.code == 0

    def why(self) -> str:
        """A short reason for people."""
        if self.ended == "exit":
            last = self.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {self.code}"]
            return last[0][:200] if self.code else "finished"
        if self.ended == "signal" and self.code is not None:
            number = -self.code
            return f"ended by {signal.Signals(number).name if number in set(signal.Signals) else number}"
        return {"timeout": "out of time", "output": "too much output", "threads": "too many threads"}[self.ended]


def run(program: Program, limits: BoxLimits, walls: Sequence[str]) -> BoxRun:
    """Run it behind these walls, all of which must go up.

    Raises: BoxError. Whatever the program does is a BoxRun.
    """
    waited = _waiting_one()
    if waited is not None:
        with suppress(_Gone):  # its end while it waited has nothing to do with this program: a new one runs it
            return _run_in(waited, program, limits, walls)
    return _run_in(_Warden(), program, limits, walls)


def _run_in(warden: _Warden, program: Program, limits: BoxLimits, walls: Sequence[str]) -> BoxRun:
    try:
        answer = warden.run(program, limits, walls)
    except BaseException:
        warden.end()
        raise
    _give_back(warden)
    return answer


class _Warden:
    def __init__(self) -> None:
        # The hash seed makes the order of sets the same in every run. Nothing else of the environment goes in.
        self._process = start.start(
            _COMMAND,
            environment={"PYTHONHASHSEED": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout

    def run(self, program: Program, limits: BoxLimits, walls: Sequence[str]) -> BoxRun:
        header = {
            "walls": list(walls),
            "limits": limits.to_json(),
            "function": program.function,
            "arguments": list(program.arguments),
            "readable": list(program.readable),
        }
        pieces = [text.encode(errors="replace") for text in (program.source, program.stdin)]
        try:
            write_message(self._requests.fileno(), header, pieces)
            poller = select.poll()  # not select(), which knows no descriptor above 1023
            poller.register(self._replies, select.POLLIN)
            if not poller.poll((limits.wall_s + _PATIENCE_S) * 1000):
                raise BoxError("", "the process that watches the box does not answer")
            reply, outputs = read_message(self._replies.fileno())
        except PipeClosed:
            raise _Gone("", "the process that watches the box has ended") from None
        if "reason" in reply:
            raise BoxError(reply["wall"], reply["reason"])
        stdout, stderr, result = outputs
        return BoxRun(
            stdout=stdout,
            stderr=stderr,
            result=result,
            **{key: reply[key] for key in ("ended", "code", "wall_s", "waited_s")},
        )

    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """The warden goes, and with it what is in its box."""
        self._requests.close()
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        self._replies.close()

    def forget(self) -> None:
        """Leave it to the process that this one was forked from."""
        self._process.returncode = 0  # the parent waits for it
        self._requests.close()
        self._replies.close()


_idle: list[_Warden] = []
_lock = threading.Lock()


def prepare() -> None:
    """Start a warden for the first run, now instead of then."""
    _give_back(_waiting_one() or _Warden())


def _waiting_one() -> _Warden | None:
    """A warden that waits for work, if there is one that has not ended."""
    while True:
        with _lock:
            if not _idle:
                return None
            warden = _idle.pop()
        if warden.alive():
            return warden
        warden.end()


def _give_back(warden: _Warden) -> None:
    with _lock:
        _idle.append(warden)


def waiting() -> int:
    """Count the wardens that wait for work."""
    with _lock:
        return len(_idle)


def close(but: int = 0) -> None:
    """End the wardens that wait for work, except ``but`` of them. They also end with this process."""
    with _lock:
        wardens, _idle[but:] = _idle[but:], []
    for warden in wardens:
        warden.end()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for warden in _idle:
        warden.forget()
    _idle.clear()


atexit.register(close)
os.register_at_fork(after_in_child=_after_fork)
