"""``posttrain train --restarts N``: a supervisor that starts the run again after a crash, at most N times, each with its reason.

It imports nothing heavy. The run is its child, in a session of its own, and tells it over a socket where its folder is and which
error ended it. A second child, the standby, has imported its libraries and waits, so that a restart does not have to: it forks
the run and waits for the next, or where it cannot fork, becomes the run (``cli.supervised``).
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import typer

from posttrain.cli.supervised import Message, messages_in
from posttrain.errors import RequestError, RunInterrupted, RunStopped
from posttrain.processes.start import signal_name
from posttrain.run.early_stop import AT_ONCE
from posttrain.run.stopping import SIGNALS

PROGRAM = ("-m", "posttrain")
RECORD = "restarts.jsonl"
IN_USE = "InUse"  # run.lock's error
STANDBY_AFTER_S = 5.0  # of a run: by then its own start is over, or nearly
LONGEST_PAUSE_S = 60.0
LOOK_S = 0.05
# A process with threads does not fork. NumPy's matrix library starts some when it is imported, and Arrow's allocator one that
# only returns memory.
STANDBY_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
# Ends of a process's own making; SIGKILL comes from outside, also where memory runs out.
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of a run."""

    code: int  # exit code; minus the signal's number
    step: int  # in which it was: the one after the last in metrics.jsonl
    error: str = ""  # the error that it reported; "": it could not
    in_use: bool = False  # its folder was locked, as by a process that had not ended yet

    @property
    def reason(self) -> str:
        """The end in words, with the first line of the error."""
        how = f"was killed by {signal_name(-self.code)}" if self.code < 0 else f"ended with exit code {self.code}"
        line = self.error.partition("\n")[0]
        return f"{how} in step {self.step}" + (f" ({line})" if line else "")

    @property
    def cause(self) -> str | None:
        """The error, without the numbers in it (addresses, times); None for an end that says nothing about the run itself."""
        if self.error:
            return re.sub(r"0x[0-9a-f]+|\d+", "#", self.error)
        if self.code >= 0 or -self.code in CRASHES:
            return str(self.code)
        return None


def no_restart(endings: Sequence[Ending], most: int) -> str | None:
    """The reason why a run is not started again after the last of its endings; "" where none is needed, None: it is.

    It is not when it is done, a signal has stopped it, or its request is wrong; when it met an error in a step in which it met
    the same one before; and after ``most`` restarts.
    """
    *before, last = endings
    if last.code in (0, RunInterrupted.exit_code, AT_ONCE):
        return ""
    if last.code == RequestError.exit_code and not (before and last.in_use):
        return ""
    met = [(one.step, one.cause) for one in before if one.cause is not None and not one.in_use]
    if (last.step, last.cause) in met:
        return f"it met the same error in step {last.step} again"
    if len(before) >= most:
        return f"it was started again {most} time{'s' * (most != 1)}, as many as --restarts allows"
    return None


def pause_s(endings: Sequence[Ending]) -> float:
    """Seconds to wait before a restart: none after progress, else 1, 2, 4, … of a series of endings in the same step."""
    same = 0
    for earlier, later in zip(reversed(endings[:-1]), reversed(endings[1:]), strict=True):
        if earlier.step < later.step:
            break
        same += 1
    return min(2.0 ** (same - 1), LONGEST_PAUSE_S) if same else 0.0


def supervise(arguments: Sequence[str], most: int) -> int:
    """Run ``posttrain`` with these arguments, and again after a crash.

    Returns: the exit code of the last run; RunStopped's where a signal ended it.
    """
    with _Supervisor(arguments) as supervisor:
        while True:
            ending = supervisor.run()
            why_not = "" if supervisor.asked else no_restart(supervisor.endings, most)
            if why_not is None:
                supervisor.tell_restart(ending, most)
                why_not = supervisor.rest(pause_s(supervisor.endings))
            if why_not is not None:
                return supervisor.over(ending, why_not)


def without_restarts(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command without --restarts and its number."""
    found: list[str] = []
    given = iter(arguments)
    for each in given:
        if each == "--restarts":
            next(given, None)
        elif not each.startswith("--restarts="):
            found.append(each)
    return found


class _Supervisor:
    """The children, and the signals that are handed on to the run."""

    def __init__(self, arguments: Sequence[str]):
        self._arguments = list(arguments)
        self._run: _Child | None = None
        self._standby: _Child | None = None
        self._folder: Path | None = None
        self._before: dict[signal.Signals, Any] = {}
        self.endings: list[Ending] = []
        self.asked = False  # to stop

    def __enter__(self) -> _Supervisor:
        for number in SIGNALS:
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._hand_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for child in (self._standby, self._run):
            if child is not None:
                child.close()

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if self._run is not None:
            self._run.send(number)

    def run(self) -> Ending:
        """Run until the end of the child."""
        standby, self._standby = self._standby, None
        if standby is not None and not standby.go():
            standby.close()
            standby = None
        self._run = run = standby or _Child(self._again() if self.endings else self._arguments)
        if self.asked:  # while it was started
            run.send(signal.SIGTERM)
        began = time.monotonic()
        while (code := run.poll()) is None:
            needed = self._standby is None and run.alone and not self.asked
            if needed and time.monotonic() - began > STANDBY_AFTER_S:
                self._standby = _Child([*self._again(), "--standby"], STANDBY_ENVIRONMENT)
            time.sleep(LOOK_S)
        told = run.take_messages()
        self._folder = next((Path(one.folder) for one in told if one.folder), self._folder)
        error = next((one.error for one in told if one.error), "")
        ending = Ending(
            code=code, step=self._last_step() + 1, error=error, in_use=any(one.kind == IN_USE for one in told)
        )
        self.endings.append(ending)
        if not run.alone and run.process.poll() is None:
            self._run, self._standby = None, run
        else:
            run.close()
        return ending

    def _again(self) -> list[str]:
        """The arguments of a restart: what --start-over puts aside is put aside once."""
        return [each for each in self._arguments if each != "--start-over"]

    def _last_step(self) -> int:
        if self._folder is None:
            return 0
        with suppress(OSError, ValueError, KeyError, TypeError, IndexError):
            lines = (self._folder / "metrics.jsonl").read_text(encoding="utf-8").split("\n")
            return int(
                json.loads(lines[-2])["step"]
            )  # behind the last newline is what a killed process left half-written
        return 0

    def tell_restart(self, ending: Ending, most: int) -> None:
        """Say why the run is started again, on the console and in restarts.jsonl of its folder."""
        number = len(self.endings)
        typer.echo(f"posttrain: the run {ending.reason}; restart {number} of at most {most}", err=True)
        if self._folder is not None:
            line = {
                "restart": number,
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
                "step": ending.step,
                "reason": ending.reason,
            }
            with suppress(OSError), open(self._folder / RECORD, "a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def rest(self, seconds: float) -> str | None:
        """Wait. Returns: "" when a signal has come meanwhile, else None."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.asked:
            time.sleep(LOOK_S)
        return "" if self.asked else None

    def over(self, ending: Ending, why_not: str) -> int:
        """Say why the run is not started again. Returns: the exit code."""
        if why_not:
            typer.echo(f"posttrain: the run {ending.reason}, and is not started again: {why_not}", err=True)
        if ending.code >= 0:
            return ending.code
        return RunInterrupted.exit_code if self.asked else RunStopped.exit_code


class _Child:
    """A process that is a run, or a standby, which begins one at ``go``."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str] | None = None):
        """Args: environment, defaults of variables that the process may have of its own."""
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            command = [sys.executable, *PROGRAM, *arguments, f"--supervised={theirs.fileno()}"]
            variables = {**(environment or {}), **os.environ}
            self.process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), start_new_session=True, env=variables)
        self._run: int | None = self.process.pid  # None: a standby that has not begun one
        self._messages: list[Message] = []
        self._unread = b""  # the beginning of a line

    @property
    def alone(self) -> bool:
        """True when this process is the run itself, and no standby is left when it ends."""
        return self._run == self.process.pid

    def go(self) -> bool:
        """Tell a standby that it is its turn, which may still be importing. Returns: False when it has ended."""
        if self.process.poll() is not None:
            return False
        with suppress(OSError):
            self._socket.sendall(b"go\n")
            self._run = None
            return True
        return False

    def poll(self) -> int | None:
        """The exit code of the run, or minus the number of the signal that ended it; None while it lives."""
        self._read()
        if self._run is None:
            self._run = next((message.pid for message in self._messages if message.pid), None)
        if self._run is None or self.alone:
            return self.process.poll()
        if ended := [message.code for message in self._messages if message.code is not None]:
            return ended[0]
        if self.process.poll() is None or _lives(self._run):
            return None
        return -signal.SIGKILL  # as its parent was, which therefore could not tell how it ended

    def send(self, number: int) -> None:
        if self._run is None or self.alone:
            self.process.send_signal(number)
        else:
            with suppress(ProcessLookupError):
                os.kill(self._run, number)

    def take_messages(self) -> list[Message]:
        """Return what a run has told that is over now."""
        self._read()
        told, self._messages = self._messages, []
        return told

    def _read(self) -> None:
        with suppress(OSError):
            while got := self._socket.recv(1 << 16):
                self._unread += got
        whole, _, self._unread = self._unread.rpartition(b"\n")
        self._messages += messages_in(whole)

    def close(self) -> None:
        """End a process that still waits."""
        self._socket.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
