"""Environments in processes of their own."""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from posttrain.backends.environments.make import (
    CRASHED,
    INVALID,
    MEMORY,
    TIMEOUT,
    closed_of,
    event_of,
    scored_of,
    start_of,
    step_of,
)
from posttrain.interfaces.env import (
    EnvAsk,
    EnvEvent,
    EnvFailed,
    EnvRestored,
    EnvSpec,
    EnvWithdrawn,
    FinishedConversation,
)
from posttrain.processes import frames, wire
from posttrain.processes.environment import Kind, variables_for
from posttrain.processes.forks import ForkedEnd, ForkServer
from posttrain.records.trajectories import Trajectory

LOAD_S = 120.0  # more time for the first answer of an environment: its libraries may have to be imported
MOST_BYTES = 1 << 24  # of one answer

_READ: dict[str, Callable[[Any], EnvEvent]] = {
    "start": start_of,
    "task": start_of,
    "score": scored_of,
    "step": step_of,
    "close": closed_of,
}


@dataclass(slots=True, eq=False)
class _Worker:
    """One process, and the episode that it holds."""

    pid: int
    socket: socket.socket
    episode: str | None = None  # None: it is free
    doing: str = ""  # the command whose answer is awaited
    sent: int = 0  # commands
    number: int = 0  # of the command whose answer is awaited, or was the last: answers to earlier ones are dropped
    told: bool = True  # False: the answer is dropped
    asks: bool = False  # its environment asks for turns by itself, and has not ended
    turns: set[str] = field(default_factory=set)  # those that it waits for
    # Token ids and log-probs of turns whose requests want them; empty until they are sampled
    tokens: dict[str, list[Any]] = field(default_factory=dict)
    deadline: float = 0.0
    received: bytearray = field(default_factory=bytearray)


class ProcessHost:
    """An EnvHost with up to ``workers`` living environments; further episodes wait for one to be over.

    Args: timeout_s, for every answer of an environment; names, environments of the registry that will be played; own, classes
        and functions of the user's own that they need (``path/to/file.py:Name``), which are imported once; modules, plug-ins
        that register environments; tools, built-in ones that they have, with their options; memory_gib, of one environment
        with all that it starts; variables, further environment variables that it may see.
    """

    def __init__(
        self,
        workers: int,
        timeout_s: float,
        names: Sequence[str] = (),
        *,
        own: Sequence[str] = (),
        modules: Sequence[str] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        memory_gib: float = 4.0,
        variables: Sequence[str] = (),
    ) -> None:
        self._most = workers
        self._timeout_s = timeout_s
        self._memory_gib = memory_gib
        self._server = ForkServer(
            "the process that starts environments",
            "posttrain.backends.environments.worker",
            names=names,
            own=own,
            modules=modules,
            tools=tools,
            memory_bytes=int(memory_gib * 2**30),
            variables=variables_for(Kind.USER_CODE, named=variables),
        )
        self._workers: list[_Worker] = []
        self._by_episode: dict[str, _Worker] = {}
        # Episodes that wait for a process: their commands, and the time that the answers to them may take.
        self._queue: deque[tuple[str, dict[str, Any], float]] = deque()
        self._events: list[tuple[str, EnvEvent]] = []

    def load(self, names: Sequence[str]) -> dict[str, str]:
        worker = self._fork()
        try:
            fd = worker.socket.fileno()
            frames.write_frame(fd, wire.to_bytes({"do": "load", "names": list(names)}), LOAD_S)
            failures: dict[str, str] = wire.from_bytes(frames.read_frame(fd, MOST_BYTES, LOAD_S))["ok"]
        except (frames.PipeClosed, OSError) as error:
            late = isinstance(error, TimeoutError)
            end = f"took longer than {LOAD_S:g} s" if late else f"ended its process: {self._reap(worker)}"
            if late:
                self._kill(worker)
            return {", ".join(names): f"importing {end}"}
        return failures

    def start(self, episode: str, spec: EnvSpec, seed: int, saved: Any = None) -> None:
        command = {"do": "start", "spec": asdict(spec), "seed": seed, "saved": saved}
        self._queue.append((episode, command, self._timeout_s + LOAD_S))
        self._fill()

    def task(self, episode: str, spec: EnvSpec, seed: int) -> None:
        command = {"do": "task", "spec": asdict(spec), "seed": seed}
        self._queue.append((episode, command, self._timeout_s + LOAD_S))
        self._fill()

    def score(self, episode: str, spec: EnvSpec, seed: int, conversation: FinishedConversation) -> None:
        steps = len(conversation.turns) + 1  # each has its time
        command, timeout_s = {"do": "score", "conversation": asdict(conversation)}, self._timeout_s * steps
        if (worker := self._by_episode.get(episode)) is not None:
            self._send(worker, command, timeout_s)
            return
        self._queue.append((episode, {**command, "spec": asdict(spec), "seed": seed}, timeout_s + LOAD_S))
        self._fill()

    def step(self, episode: str, action: str, cut: bool = False) -> None:
        self._send(self._by_episode[episode], {"do": "step", "action": action, "cut": cut}, self._timeout_s)

    def sampled(self, episode: str, turn: str, response: Trajectory) -> None:
        worker = self._by_episode.get(episode)
        if worker is not None and turn in worker.tokens:
            worker.tokens[turn] = [list(response.token_ids), list(response.logprobs)]

    def answer(
        self, episode: str, turn: str, action: str, *, cut: bool, prompt_tokens: int, response_tokens: int
    ) -> None:
        worker = self._by_episode.get(episode)
        if worker is None:  # it has failed meanwhile
            return
        command = {"do": "answer", "turn": turn, "action": action, "cut": cut}
        if tokens := worker.tokens.pop(turn, []):
            command["tokens"] = tokens
        self._write(worker, {**command, "prompt_tokens": prompt_tokens, "response_tokens": response_tokens})
        worker.turns.discard(turn)
        if not worker.turns:
            worker.deadline = time.monotonic() + self._timeout_s

    def finish(self, episode: str) -> None:
        self._send(self._by_episode[episode], {"do": "close"}, self._timeout_s)

    def drop(self, episode: str, failed: EnvFailed | None = None) -> None:
        worker = self._by_episode.get(episode)
        if worker is None:  # it has failed and is closed, or has not begun
            self._queue = deque(each for each in self._queue if each[0] != episode)
            return
        worker.told = False
        self._send(worker, {"do": "close"}, self._timeout_s)

    def wait(self, timeout_s: float) -> list[tuple[str, EnvEvent]]:
        deadline = time.monotonic() + timeout_s
        while True:
            busy = [worker for worker in self._workers if worker.doing or worker.asks]
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
        self._server.close()

    def _fill(self) -> None:
        """Begin waiting episodes while there is room."""
        while self._queue:
            worker = next((each for each in self._workers if each.episode is None), None)
            if worker is None:
                if len(self._workers) >= self._most:
                    return
                worker = self._fork()
            self._begin(worker, *self._queue.popleft())

    def _begin(self, worker: _Worker, episode: str, command: dict[str, Any], timeout_s: float) -> None:
        """Begin an episode in a process that is free."""
        worker.episode, worker.told = episode, True
        self._by_episode[episode] = worker
        try:
            wire.to_bytes(command)
        except (TypeError, ValueError) as error:
            self._tell(worker, EnvFailed(INVALID, f"the row cannot be handed to an environment: {error}"))
            self._free(worker)
        else:
            self._send(worker, command, timeout_s)

    def _send(self, worker: _Worker, command: dict[str, Any], timeout_s: float) -> None:
        worker.doing, worker.deadline = command["do"], time.monotonic() + timeout_s
        worker.asks = False
        self._write(worker, command)
        worker.number = worker.sent

    def _write(self, worker: _Worker, command: dict[str, Any]) -> None:
        worker.sent += 1
        # The end of the process, or its silence, shows where answers are read.
        with suppress(frames.PipeClosed, TimeoutError, OSError):
            data = wire.to_bytes({**command, "number": worker.sent})
            frames.write_frame(worker.socket.fileno(), data, self._timeout_s)

    def _look(self, busy: Sequence[_Worker], deadline: float) -> None:
        """Wait for an answer, or for the first time limit, and take in what has come."""
        self._server.check()
        poller = select.poll()
        by_fd = {worker.socket.fileno(): worker for worker in busy}
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
        until = min([deadline, *(worker.deadline for worker in busy if worker.doing or not worker.turns)])
        for fd, _ in poller.poll(max(until - time.monotonic(), 0.0) * 1000):
            self._receive(by_fd[fd])
        now = time.monotonic()
        for worker in busy:
            waits = worker.doing or (worker.asks and not worker.turns)
            if waits and worker.deadline <= now:
                what = f"no answer to {worker.doing}" if worker.doing else "neither a request nor its end came"
                self._tell(worker, EnvFailed(TIMEOUT, f"{what} in time (environment.timeout_s is {self._timeout_s:g})"))
                self._kill(worker)

    def _receive(self, worker: _Worker) -> None:
        try:
            data = worker.socket.recv(1 << 20)
            worker.received += data
            answers = []
            while (frame := frames.take_frame(worker.received, MOST_BYTES)) is not None:
                answers.append(wire.from_bytes(frame))
            if not data and not answers:
                episode, told = worker.episode, worker.told
                end = self._reap(worker)
                failed = EnvFailed(CRASHED, f"its process ended: {end}")
                if end.over_memory:
                    failed = EnvFailed(MEMORY, f"its processes hold more than {self._memory_gib:g} GiB")
                if told and episode is not None:
                    self._events.append((episode, failed))
                return
        except (OSError, frames.FrameTooLong, ValueError) as error:
            self._tell(worker, EnvFailed(INVALID, f"its process sent what is no answer: {error}"))
            self._kill(worker)
            return
        for answer in answers:
            if isinstance(answer, dict) and "event" in answer:
                self._take_event(worker, event_of(answer["event"]))
            else:
                self._take(worker, answer)

    def _take_event(self, worker: _Worker, event: EnvEvent) -> None:
        """Take in what an environment has said by itself."""
        if not worker.asks:
            return  # it is being closed
        match event:
            case EnvAsk():
                worker.turns.add(event.turn)
                if event.options.tokens:
                    worker.tokens[event.turn] = []
            case EnvWithdrawn():
                worker.turns.discard(event.turn)
                worker.tokens.pop(event.turn, None)
                worker.deadline = time.monotonic() + self._timeout_s
            case _:
                worker.asks = False
        self._tell(worker, event)
        if isinstance(event, EnvFailed):
            worker.told = False
            self._send(worker, {"do": "close"}, self._timeout_s)

    def _take(self, worker: _Worker, answer: Any) -> None:
        if isinstance(answer, dict) and answer.get("number", worker.number) < worker.number:
            return  # its episode was dropped while the environment was at work
        if worker.doing == "start" and isinstance(answer, dict) and answer.get("ok") == "asks":
            worker.doing, worker.asks, worker.turns = "", True, set()
            return
        if isinstance(answer, dict) and "ok" in answer:
            event = _READ[worker.doing](answer["ok"])
        else:
            reason, detail = answer["failed"] if isinstance(answer, dict) and "failed" in answer else (INVALID, answer)
            event = EnvFailed(str(reason), str(detail))
        done = worker.doing
        worker.doing = ""
        if isinstance(event, EnvRestored) and (turn := answer["ok"].get("waits_for")) is not None:
            worker.asks, worker.turns = True, {str(turn)}
        self._tell(worker, event)
        if done == "close" or (isinstance(answer, dict) and "failed" in answer):
            self._free(worker)
        elif isinstance(event, EnvFailed):  # its episode has failed, and the environment still lives
            worker.told = False
            self._send(worker, {"do": "close"}, self._timeout_s)

    def _tell(self, worker: _Worker, event: EnvEvent) -> None:
        if worker.told and worker.episode is not None:
            self._events.append((worker.episode, event))

    def _free(self, worker: _Worker) -> None:
        if worker.episode is not None:
            self._by_episode.pop(worker.episode, None)
        worker.episode, worker.doing, worker.asks, worker.tokens = None, "", False, {}

    def _fork(self) -> _Worker:
        pid, own = self._server.fork()
        own.setblocking(False)
        worker = _Worker(pid, own)
        self._workers.append(worker)
        return worker

    def _kill(self, worker: _Worker) -> None:
        self._gone(worker)
        self._server.kill(worker.pid)

    def _reap(self, worker: _Worker) -> ForkedEnd:
        """Reap a process that has closed its socket."""
        self._gone(worker)
        return self._server.reap(worker.pid)

    def _gone(self, worker: _Worker) -> None:
        worker.socket.close()
        self._workers.remove(worker)
        self._free(worker)
