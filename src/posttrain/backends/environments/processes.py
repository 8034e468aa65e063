"""Environments in processes of their own."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from posttrain.backends.environments.make import (
    CRASHED,
    INVALID,
    TIMEOUT,
    closed_of,
    plain_spec,
    start_of,
    step_of,
)
from posttrain.errors import RunStopped
from posttrain.interfaces.env import EnvEvent, EnvFailed, EnvSpec
from posttrain.processes import wire
from posttrain.processes.descendants import is_stopped
from posttrain.processes.pool import ENVIRONMENT

SILENCE_S = 2.0  # of the server, after which it is looked at
LOAD_S = 120.0  # more time for the first answer of an environment: its libraries may have to be imported
MOST_BYTES = 1 << 24  # of one answer

_READ: dict[str, Callable[[Any], EnvEvent]] = {"start": start_of, "step": step_of, "close": closed_of}


@dataclass(slots=True, eq=False)
class _Worker:
    """One process, and the episode that it holds."""

    pid: int
    socket: socket.socket
    episode: str | None = None  # None: it is free
    doing: str = ""  # the command that waits for an answer
    told: bool = True  # whether the answer is for anybody
    deadline: float = 0.0
    received: bytearray = field(default_factory=bytearray)


class ProcessHost:
    """An EnvHost with up to ``workers`` living environments; further episodes wait for one to be over.

    Args: timeout_s, for every answer of an environment; names, environments of the registry that will be asked for.
    """

    def __init__(self, workers: int, timeout_s: float, names: Sequence[str] = ()) -> None:
        self._most = workers
        self._timeout_s = timeout_s
        self._names = tuple(names)
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._workers: list[_Worker] = []
        self._by_episode: dict[str, _Worker] = {}
        self._queue: deque[tuple[str, EnvSpec, int]] = deque()
        self._events: list[tuple[str, EnvEvent]] = []

    def start(self, episode: str, spec: EnvSpec, seed: int) -> None:
        self._queue.append((episode, spec, seed))
        self._fill()

    def step(self, episode: str, action: str, cut: bool = False) -> None:
        self._send(self._by_episode[episode], {"do": "step", "action": action, "cut": cut}, self._timeout_s)

    def finish(self, episode: str) -> None:
        self._send(self._by_episode[episode], {"do": "close"}, self._timeout_s)

    def drop(self, episode: str) -> None:
        worker = self._by_episode.get(episode)
        if worker is not None:  # else it has failed, and is closed
            worker.told = False
            self._send(worker, {"do": "close"}, self._timeout_s)

    def wait(self, timeout_s: float) -> list[tuple[str, EnvEvent]]:
        deadline = time.monotonic() + timeout_s
        while True:
            busy = [worker for worker in self._workers if worker.doing]
            events, self._events = self._events, []
            if events or not busy:
                return events
            self._look(busy, deadline)
            self._fill()
            if not self._events and time.monotonic() >= deadline:
                return []

    def abandon(self) -> None:
        self._queue.clear()
        for worker in list(self._workers):
            if worker.doing:
                self._kill(worker)
            elif worker.episode is not None:
                self.drop(worker.episode)
        self._events = []

    def close(self) -> None:
        """The server ends with its socket, and kills what is below it."""
        self._queue.clear()
        for worker in self._workers:
            worker.socket.close()
        self._workers, self._by_episode, self._events = [], {}, []
        if self._control is not None and self._server is not None:
            self._control.close()
            try:
                self._server.wait(timeout=0.0 if is_stopped(self._server.pid) else 15.0)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
            self._control = self._server = None

    def _fill(self) -> None:
        """Begin waiting episodes while there is room."""
        while self._queue:
            worker = next((each for each in self._workers if each.episode is None), None)
            if worker is None:
                if len(self._workers) >= self._most:
                    return
                worker = self._fork()
            episode, spec, seed = self._queue.popleft()
            worker.episode, worker.told = episode, True
            self._by_episode[episode] = worker
            try:
                command = {"do": "start", "spec": plain_spec(spec), "seed": seed}
                wire.to_bytes(command)
            except (TypeError, ValueError) as error:
                self._tell(worker, EnvFailed(INVALID, f"the row cannot be handed to an environment: {error}"))
                self._free(worker)
            else:
                self._send(worker, command, self._timeout_s + LOAD_S)

    def _send(self, worker: _Worker, command: dict[str, Any], timeout_s: float) -> None:
        worker.doing, worker.deadline = command["do"], time.monotonic() + timeout_s
        with suppress(wire.Ended, TimeoutError, OSError):  # its end, or its silence, shows where answers are read
            wire.write_frame(worker.socket.fileno(), wire.to_bytes(command), self._timeout_s)

    def _look(self, busy: Sequence[_Worker], deadline: float) -> None:
        """Wait for an answer, or for the first time limit, and take in what has come."""
        self._check()
        poller = select.poll()
        by_fd = {worker.socket.fileno(): worker for worker in busy}
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
        until = min(deadline, min(worker.deadline for worker in busy))
        for fd, _ in poller.poll(max(until - time.monotonic(), 0.0) * 1000):
            self._receive(by_fd[fd])
        now = time.monotonic()
        for worker in busy:
            if worker.doing and worker.deadline <= now:
                self._tell(worker, EnvFailed(TIMEOUT, f"no answer to {worker.doing} in time"))
                self._kill(worker)

    def _receive(self, worker: _Worker) -> None:
        try:
            data = worker.socket.recv(1 << 20)
            worker.received += data
            frame = wire.take_frame(worker.received, MOST_BYTES)
            if not data and frame is None:
                episode, told = worker.episode, worker.told
                failed = EnvFailed(CRASHED, f"its process ended: {self._reap(worker)}")
                if told and episode is not None:
                    self._events.append((episode, failed))
                return
            answer = None if frame is None else wire.from_bytes(frame)
        except (OSError, wire.TooLong, ValueError) as error:
            self._tell(worker, EnvFailed(INVALID, f"its process sent what is no answer: {error}"))
            self._kill(worker)
            return
        if answer is not None:
            self._take(worker, answer)

    def _take(self, worker: _Worker, answer: Any) -> None:
        if isinstance(answer, dict) and "ok" in answer:
            event = _READ[worker.doing](answer["ok"])
        else:
            reason, detail = answer["failed"] if isinstance(answer, dict) and "failed" in answer else (INVALID, answer)
            event = EnvFailed(str(reason), str(detail))
        done = worker.doing
        worker.doing = ""
        self._tell(worker, event)
        if done == "close" or (isinstance(answer, dict) and "failed" in answer):
            self._free(worker)
        elif isinstance(event, EnvFailed):  # the environment lives on in its process, and nobody wants it
            worker.told = False
            self._send(worker, {"do": "close"}, self._timeout_s)

    def _tell(self, worker: _Worker, event: EnvEvent) -> None:
        if worker.told and worker.episode is not None:
            self._events.append((worker.episode, event))

    def _free(self, worker: _Worker) -> None:
        if worker.episode is not None:
            self._by_episode.pop(worker.episode, None)
        worker.episode, worker.doing = None, ""

    def _fork(self) -> _Worker:
        own, workers_end = socket.socketpair()
        with workers_end:
            pid = int(self._ask(b"fork", workers_end.fileno()))
        own.setblocking(False)
        worker = _Worker(pid, own)
        self._workers.append(worker)
        return worker

    def _kill(self, worker: _Worker) -> None:
        self._gone(worker)
        self._ask(f"kill {worker.pid}".encode())

    def _reap(self, worker: _Worker) -> str:
        """How a process that has closed its socket ended, in words."""
        self._gone(worker)
        code = os.waitstatus_to_exitcode(int(self._ask(f"reap {worker.pid}".encode())))
        if code >= 0:
            return f"exit code {code}"
        with suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
        return f"signal {-code}"

    def _gone(self, worker: _Worker) -> None:
        worker.socket.close()
        self._workers.remove(worker)
        self._free(worker)

    def _ask(self, message: bytes, fd: int | None = None) -> bytes:
        """Raises: RunStopped when the server does not answer, which only something outside the run can bring about."""
        control = self._started()
        try:
            socket.send_fds(control, [message], [] if fd is None else [fd])
            answer = b""
            until = time.monotonic() + LOAD_S
            while not answer:
                try:
                    answer = control.recv(64)
                    if not answer:
                        raise self._lost("has ended")
                except TimeoutError:
                    self._check()
                    if time.monotonic() > until:
                        raise self._lost(f"did not answer within {LOAD_S:g} s") from None
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._lost("has ended") from error
        except OSError as error:
            raise self._lost(f"cannot be reached: {error}") from error
        return answer

    def _check(self) -> None:
        """Raises: RunStopped when the server is no more, or stands still."""
        if self._server is not None:
            if self._server.poll() is not None:
                raise self._lost("has ended")
            if is_stopped(self._server.pid):
                raise self._lost("is stopped: it got SIGSTOP, or a debugger holds it")

    def _lost(self, why: str) -> RunStopped:
        pid = self._server.pid if self._server is not None else 0
        return RunStopped(f"the process that starts environments (process {pid}) {why}")

    def _started(self) -> socket.socket:
        if self._control is None:
            own, servers_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            module = "posttrain.backends.environments.server"
            with servers_end:
                self._server = subprocess.Popen(
                    [sys.executable, "-m", module, str(servers_end.fileno()), ",".join(self._names)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[servers_end.fileno()],
                    env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    start_new_session=True,  # Ctrl-C is for the trainer, which ends it itself
                )
            own.settimeout(SILENCE_S)
            self._control = own
        return self._control
