"""The side of a supervised run (``cli.restarts``): it waits until it is its turn, and tells its folder and its error.

A standby without accelerators forks each run that is started again, and waits for the next: libraries are imported once.
Elsewhere it becomes the run itself, because a library of an accelerator may not survive a fork.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import asdict, dataclass
from io import StringIO

from posttrain.errors import ConfigError, Problem
from posttrain.processes import descendants, proc
from posttrain.run.early_stop import SIGNALS, heed_signals
from posttrain.run.stopping import StopSignal

LONGEST_ERROR = 2000  # characters


@dataclass(frozen=True, slots=True)
class Message:
    """A line to the supervisor."""

    pid: int = 0  # of the run that a standby has begun
    code: int | None = None  # with which that run has ended: its exit code, or minus the number of a signal
    folder: str = ""  # of the run
    error: str = ""  # that ended it
    kind: str = ""  # of the error


def messages_in(data: bytes) -> list[Message]:
    """Read lines of a child; one that was cut off by its death is left out."""
    found = []
    for line in data.split(b"\n"):
        with suppress(ValueError, TypeError):
            found.append(Message(**json.loads(line)))
    return found


class Supervised:
    """The connection to the supervisor; without a descriptor there is none, and its methods are no-ops."""

    def __init__(self, descriptor: int | None, *, waits: bool = False):
        self._socket = None
        self._waits = waits
        self.accelerated = True  # false where the run uses no accelerator, which the caller finds out while it prepares
        if descriptor is not None:
            self._socket = socket.socket(fileno=descriptor)
            # A supervisor that is killed takes the run along, which saves first.
            descendants.die_with_parent(os.getppid(), signal.SIGTERM)
            StopSignal.echo_s = 1.0

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Around what a standby does in silence; it then waits for its turn, and says what it had to say.

        Raises: SystemExit when preparing fails, which the supervisor finds out by itself, or when the supervisor has ended.
        """
        if self._socket is None or not self._waits:
            yield
            return
        said = StringIO()
        try:
            with redirect_stderr(said):
                yield
        except Exception as error:
            raise SystemExit(1) from error
        self._wait_for_turn(self._socket)
        sys.stderr.write(said.getvalue())

    def _wait_for_turn(self, supervisor: socket.socket) -> None:
        """Return in the process that is to be the run. Raises: SystemExit when the supervisor has ended."""
        heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        for number in heeded:  # there is nothing to tidy up here
            signal.signal(number, signal.SIG_DFL)
        forks = not self.accelerated and proc.LINUX and proc.thread_count() == 1 and not descendants.has_children()
        while supervisor.recv(3):
            pid = os.fork() if forks else os.getpid()
            if pid and forks:
                self._tell(Message(pid=pid))
                _, status = os.waitpid(pid, 0)
                self._tell(Message(code=os.waitstatus_to_exitcode(status)))
                continue
            if forks:
                begin_after_fork()
            else:
                self._tell(Message(pid=pid))
            heed_signals()
            return
        raise SystemExit(0)

    def check(self, resume: str) -> None:
        """Raises: ConfigError for a run that must not resume."""
        if self._socket is not None and resume == "never":
            what = "--restarts starts a run again that run.resume=never forbids to resume"
            raise ConfigError(Problem(what, fix="leave one of them out", field="run.resume"))

    @contextmanager
    def told(self, folder: str) -> Iterator[None]:
        """Tell the folder of a run at its beginning, and its error at its end."""
        self._tell(Message(folder=os.path.abspath(folder)))
        try:
            yield
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self._tell(Message(error=text[:LONGEST_ERROR], kind=type(error).__name__))
            raise

    def _tell(self, message: Message) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.sendall(json.dumps(asdict(message)).encode() + b"\n")


def begin_after_fork() -> None:
    """Make a forked process what it would be if it had been started: the leader of a session, with random states of its own."""
    standby = os.getppid()
    os.setsid()
    descendants.die_with_parent(standby, signal.SIGTERM)
    if (
        "numpy" in sys.modules
    ):  # Python's own generator sees to that itself, and torch's begins with the same state everywhere
        import numpy as np

        np.random.seed(None)
