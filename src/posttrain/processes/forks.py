"""The trainer's side of a fork server: workers forked from a process that has loaded what they need, killed and counted there."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.errors import RunStopped
from posttrain.processes import fork_server, proc, start

SILENCE_S = 2.0  # of the server, after which its state is checked
LOAD_S = 120.0  # for the server to load, and to answer
CLOSE_S = 15.0  # for it to end its workers


@dataclass(frozen=True, slots=True)
class ForkedEnd:
    """The end of a worker."""

    code: int  # exit code; minus the signal's number
    over_memory: bool  # the server has killed it for that

    def __str__(self) -> str:
        return start.ended_in_words(self.code)


class _NotLoaded(Exception):
    """The server has ended, or did not answer, before it was ready."""


class ForkServer:
    """Starts with the first worker.

    Args: name, for messages; module, of fork_server.py's setup, with the ``names``, ``own``, ``modules`` and ``tools`` to load
        before the first fork; memory_bytes, of a worker with all that it starts; variables, the environment of it all. Should
        loading ``own`` fail, or start threads, each worker loads them itself.
    """

    def __init__(
        self,
        name: str,
        module: str,
        *,
        names: Sequence[str],
        own: Sequence[str],
        modules: Sequence[str] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        memory_bytes: int,
        variables: Mapping[str, str],
    ):
        self._name = name
        self._setup: dict[str, Any] = {
            "module": module,
            "names": list(names),
            "own": list(own),
            "modules": list(modules),
            "tools": [dict(each) for each in tools],
            "memory_bytes": memory_bytes,
        }
        self._variables = variables
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def fork(self) -> tuple[int, socket.socket]:
        """A new worker: its pid, and the socket that it answers on."""
        own, workers_end = socket.socketpair()
        with workers_end:
            return int(self._ask(b"fork", workers_end.fileno())), own

    def kill(self, pid: int) -> ForkedEnd:
        """End a worker and everything that it has started."""
        return _end_of(self._ask(f"kill {pid}".encode()))

    def reap(self, pid: int) -> ForkedEnd:
        """Reap a worker that has closed its socket, and end the processes that it has left behind."""
        return _end_of(self._ask(f"reap {pid}".encode()))

    def check(self) -> None:
        """Raises: RunStopped when the server has ended, or was stopped: only something outside the run can bring that about."""
        if self._process is not None:
            if self._process.poll() is not None:
                raise self._lost("has ended")
            if proc.is_stopped(self._process.pid):
                raise self._lost("is stopped: it got SIGSTOP, or a debugger holds it")

    def close(self) -> None:
        """The server ends with its socket, and kills everything below it."""
        if self._control is not None and self._process is not None:
            self._control.close()
            start.end(self._process, 0.0 if proc.is_stopped(self._process.pid) else CLOSE_S)
            self._control = self._process = None

    def _ask(self, message: bytes, fd: int | None = None) -> bytes:
        """Raises: RunStopped when the server does not answer."""
        control = self._started()
        try:
            socket.send_fds(control, [message], [] if fd is None else [fd])
            answer = self._receive(control)
        except TimeoutError:
            raise self._lost(f"did not answer within {LOAD_S:g} s") from None
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._lost("has ended") from error
        except OSError as error:
            raise self._lost(f"cannot be reached: {error}") from error
        if not answer:
            raise self._lost("has ended")
        return answer

    def _receive(self, control: socket.socket) -> bytes:
        """The next message; empty when the server has ended. Raises: TimeoutError, OSError; RunStopped when it was stopped."""
        for _ in range(int(LOAD_S / SILENCE_S)):
            try:
                return control.recv(64)
            except TimeoutError:
                self.check()
        raise TimeoutError

    def _started(self) -> socket.socket:
        if self._control is None:
            try:
                return self._start()
            except _NotLoaded:
                if not self._setup["own"]:
                    raise self._lost("did not start") from None
                self._setup["own"] = []
                return self._started()
        return self._control

    def _start(self) -> socket.socket:
        """Start the server and wait until it has loaded. Raises: _NotLoaded."""
        control, servers_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.settimeout(SILENCE_S)
        with servers_end:
            fd = servers_end.fileno()
            command = start.module_command("posttrain.processes.fork_server", str(fd), json.dumps(self._setup))
            environment = {**self._variables, **start.ONE_THREAD, **start.module_path()}
            self._process = start.start(command, environment=environment, pass_fds=[fd])
        try:
            loaded = self._receive(control) == fork_server.READY
        except (OSError, RunStopped):  # it has ended while loading, or loads for ever
            loaded = False
        if not loaded:
            control.close()
            start.end_tree(self._process)
            raise _NotLoaded
        self._control = control
        return control

    def _lost(self, why: str) -> RunStopped:
        pid = self._process.pid if self._process is not None else 0
        return RunStopped(f"{self._name} (process {pid}) {why}")


def _end_of(answer: bytes) -> ForkedEnd:
    status, _, why = answer.decode().partition(" ")
    return ForkedEnd(os.waitstatus_to_exitcode(int(status)), why == fork_server.OVER_MEMORY)
