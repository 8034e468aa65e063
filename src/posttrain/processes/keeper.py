"""The process between the trainer and a worker: it loads the functions once, forks a worker, watches it, kills and replaces it.

Started by ``pool.py`` as ``python -m posttrain.processes.keeper``. The first frame on stdin is the setup; each further frame
is a call, answered by one frame on the original stdout. The keeper ends, with all below it, when its stdin or the trainer does.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from posttrain.processes import descendants, fork_gate, frames, proc, start, wire
from posttrain.processes.limits import CRASHED, LONGEST_FACTOR, MEMORY, OUTPUT_LIMIT, PROCESS_LIMIT, TIMEOUT, Limits
from posttrain.processes.worker import (
    CANNOT_FORK,
    FAILURE,
    MOST_REQUEST_BYTES,
    NUMBER_BYTES,
    PROBLEMS,
    READY,
    Handler,
    fork_in_pools,
    has_shared_locks,
    load,
    problems_of,
    serve,
)

LOOK_EVERY_S = 0.02  # how often a call's processes and memory are counted
SHOWN_CHARACTERS = 600  # of the last output, shown where a worker ends without an answer


@dataclass(slots=True, eq=False)
class ForkedWorker:
    """A forked worker, seen from its keeper."""

    pid: int
    requests: int  # file descriptor to write to
    replies: int  # and to read from
    output: int  # its stdout and stderr
    gate: int | None = None  # where its forks ask for leave
    measure_again_at: float = 0.0  # when its processes' memory is worth another exact look
    most_processes: int = 1  # there are at most so many, itself counted
    # Processes that loading has started: they end with the worker, not with a call
    spared: frozenset[int] = frozenset()
    received: bytearray = field(default_factory=bytearray)
    calls: int = 0
    printed: int = 0  # bytes, in this call
    tail: bytes = b""
    ended: int | None = None  # wait status
    cpu_before_s: float | None = None  # CPU time of it all when this call was first looked at
    waited_s: float = 0.0  # for which boxes of this call were ready and waited for a core
    waits: dict[int, float] = field(default_factory=dict)  # the same of each, since it began

    def count_waits(self, pids: Collection[int]) -> None:
        """Add the time for which these processes have waited for a core since the last count."""
        first = not self.waits
        for pid in pids:
            wait_s = proc.core_wait_s(pid)
            self.waited_s += wait_s - self.waits.get(pid, wait_s if first else 0.0)
            self.waits[pid] = wait_s


class Passed(Exception):
    """A limit was exceeded, or the worker has ended. ``args`` are reason and detail."""


def main() -> None:
    trainer = os.getppid()
    fork_in_pools()
    requests, replies = _own_pipes()
    descendants.adopt_orphans()
    setup = wire.from_bytes(frames.read_frame(requests, MOST_REQUEST_BYTES))
    sys.path[:] = setup["sys_path"]
    os.set_blocking(replies, False)
    keeper = Keeper(setup["factory"], setup["setup"], Limits(**setup["limits"]), requests, replies, trainer)
    with suppress(frames.PipeClosed):
        if keeper.begin(load_in_worker=setup["load_in_worker"]):
            keeper.run()
    descendants.kill_all_descendants()
    os._exit(0)  # whatever the loaded modules want to do at exit is not wanted here


def _own_pipes() -> tuple[int, int]:
    """Keep stdin and stdout from the loaded modules: they read nothing, and print to stderr."""
    requests, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


class Keeper:
    def __init__(self, factory: str, setup: Any, limits: Limits, requests: int, replies: int, trainer: int):
        self._factory = factory
        self._setup = setup
        self._limits = limits
        self._requests = requests
        self._replies = replies
        self._handler: Handler | None = None  # None: each worker loads its own
        self._worker: ForkedWorker | None = None
        self._trainer = trainer

    def begin(self, *, load_in_worker: bool) -> bool:
        """Load, fork the first worker, and report to the trainer. Returns False when there is no worker.

        The import of a module may never return, and the keeper does not look for the trainer meanwhile. The thread that
        started this process waits for the reply, so its end is the trainer's.
        """
        descendants.die_with_parent(self._trainer)
        reply = READY
        if not load_in_worker:
            reply = self._load()
        if reply == READY:
            reply = self._fork()
        descendants.outlive_parent()
        frames.write_frame(self._replies, reply, look=self._look_for_trainer)
        return reply == READY

    def run(self) -> None:
        """Answer calls. Raises: PipeClosed when the trainer is gone."""
        look = self._look_for_trainer
        while True:
            request = frames.read_frame(self._requests, MOST_REQUEST_BYTES, look=look)
            frames.write_frame(self._replies, self._call(request), look=look)

    def _look_for_trainer(self) -> None:
        """Raises: PipeClosed when the trainer is gone."""
        if os.getppid() != self._trainer:
            raise frames.PipeClosed

    def _load(self) -> bytes:
        try:
            self._handler = load(self._factory, self._setup)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's file may fail in any way; it is reported
            return problems_of(error)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number in (signal.SIGCHLD, signal.SIGALRM, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
        unforkable = proc.thread_count() > 1 or descendants.has_children() or has_shared_locks()
        return CANNOT_FORK if unforkable else READY

    def _fork(self) -> bytes:
        """Start a worker; returns its report after loading."""
        request_end, requests = os.pipe()
        replies, reply_end = os.pipe()
        output, output_end = os.pipe()
        gate, gate_end = socket.socketpair()

        def work() -> None:
            for fd in (requests, replies, output, self._requests, self._replies):
                os.close(fd)
            gate.close()
            serve(self._make, request_end, reply_end, output_end, gate_end, self._limits)

        pid = start.fork(work)
        for fd in (request_end, reply_end, output_end):
            os.close(fd)
        gate_end.close()
        for fd in (requests, replies, output):
            os.set_blocking(fd, False)
        worker = self._worker = ForkedWorker(pid, requests, replies, output)
        try:
            reply = self._exchange(worker, b"", self._limits.load_s, counted=False)
        except Passed as passed:
            self._end()
            reason, detail = passed.args
            return PROBLEMS + wire.to_bytes([[f"loading in a worker failed: {reason}: {detail}", "", "", ""]])
        if reply == READY:
            worker.gate = fork_gate.receive(gate)
        worker.spared = frozenset(proc.descendants(os.getpid())) - {pid}
        worker.most_processes += len(worker.spared)
        return reply

    def _make(self) -> Handler:
        return self._handler or load(self._factory, self._setup)

    def _call(self, request: bytes) -> bytes:
        """Answer a request, with the failure that ended it where there is one."""
        if self._worker is None and (reply := self._fork()) != READY:
            self._end()
            return FAILURE + wire.to_bytes([CRASHED, "a new worker could not be made: " + reply[1:].decode()[:500]])
        worker = self._worker
        assert worker is not None
        worker.printed, worker.tail, worker.cpu_before_s = 0, b"", None
        worker.waited_s, worker.waits = 0.0, {}
        worker.calls += 1
        number = worker.calls.to_bytes(NUMBER_BYTES)
        try:
            reply = self._exchange(worker, frames.frame(number + request), self._limits.wall_s, counted=True)
            if reply[:NUMBER_BYTES] != number:
                raise Passed(CRASHED, "something else wrote into the pipe of the worker's answers")
        except Passed as passed:
            self._end()
            return FAILURE + wire.to_bytes(list(passed.args))
        reply = reply[NUMBER_BYTES:]
        if reply[:1].islower():
            self._end()
        elif proc.children(worker.pid) or proc.children(os.getpid()) != [worker.pid]:
            self._end_what_was_left(worker)
        if self._worker is worker and (worker.received or _has_more(worker.replies)):
            self._end()  # a second answer to one call would be taken for the answer to the next
        return reply[:1].upper() + reply[1:]

    def _exchange(self, worker: ForkedWorker, request: bytes, wall_s: float, *, counted: bool) -> bytes:
        """Send a frame, and wait for one. Raises: Passed."""
        start = time.monotonic()
        look = start + LOOK_EVERY_S
        poller = select.poll()
        poller.register(worker.replies, select.POLLIN)
        poller.register(worker.output, select.POLLIN)
        if worker.gate is not None:
            poller.register(worker.gate, select.POLLIN)
        if request:
            poller.register(worker.requests, select.POLLOUT)
        while True:
            now, end = time.monotonic(), start + min(wall_s + worker.waited_s, LONGEST_FACTOR * wall_s)
            if now >= end:
                raise Passed(TIMEOUT, f"no answer within {wall_s:g} s{_with_output(worker)}")
            ready = poller.poll(max(min(end, look) - now, 0.0) * 1000 + 1)
            for fd, _ in ready:
                if fd == worker.output:
                    if not self._drain(worker, counted):
                        poller.unregister(fd)
                elif fd == worker.replies:
                    if (reply := self._receive(worker, poller)) is not None:
                        self._drain(worker, False)  # what this call printed is not the next one's
                        return reply
                elif fd == worker.gate:
                    self._ask_to_fork(worker)
                elif fd == worker.requests:
                    request = _send(fd, request)
                    if not request:
                        poller.unregister(fd)
            if time.monotonic() >= look:
                look = time.monotonic() + LOOK_EVERY_S
                self._look(worker, counted)

    def _drain(self, worker: ForkedWorker, counted: bool) -> bool:
        """Read printed output. Returns False at its end. Raises: Passed when it is too much."""
        with suppress(BlockingIOError):
            got = os.read(worker.output, 1 << 16)
            worker.printed += len(got)
            worker.tail = (worker.tail + got)[-(1 << 14) :]
            if counted and worker.printed > self._limits.output_bytes:
                raise Passed(OUTPUT_LIMIT, f"printed more than {self._limits.output_bytes} bytes")
            return bool(got)
        return True

    def _receive(self, worker: ForkedWorker, poller: select.poll) -> bytes | None:
        """Return the reply once it is complete. Raises: Passed."""
        with suppress(BlockingIOError):
            got = os.read(worker.replies, 1 << 16)
            if not got:
                poller.unregister(worker.replies)
                self._wait_for_end(worker)
                raise _ended(worker)
            worker.received += got
        try:
            return frames.take_frame(worker.received, self._limits.answer_bytes)
        except frames.FrameTooLong as error:
            raise Passed(OUTPUT_LIMIT, f"the answer is too long: {error}") from None

    def _ask_to_fork(self, worker: ForkedWorker) -> None:
        """Let a process fork. Raises: Passed when there are too many, which leaves it waiting to be killed."""
        assert worker.gate is not None
        number = fork_gate.waiting(worker.gate)
        if number is None:
            return
        worker.most_processes += 1
        if worker.most_processes > self._limits.processes:  # if none had ended; now they are counted
            worker.most_processes = proc.usage(proc.descendants(os.getpid())).processes + 1
            self._count(worker.most_processes)
        fork_gate.let_pass(worker.gate, number)

    def _count(self, count: int) -> None:
        """Raises: Passed when these are too many processes."""
        if count > self._limits.processes:
            raise Passed(PROCESS_LIMIT, f"{count} processes, and {self._limits.processes} are allowed")

    def _look(self, worker: ForkedWorker, counted: bool) -> None:
        """Measure what the call uses. Raises: Passed when it is too much or the worker has ended, PipeClosed."""
        self._look_for_trainer()
        self._reap(worker)
        if worker.ended is not None:
            self._drain(worker, False)
            raise _ended(worker)
        if not counted:
            return
        limits, pids = self._limits, proc.descendants(os.getpid())
        used = proc.usage(pids)
        # What loading has started watches boxes, whose programs have limits of their own: a program that computes on many
        # cores at once is late, and so wrong, by those, not without a score by this one.
        own = proc.descendants(os.getpid(), without=worker.spared) if worker.spared else pids
        cpu_s = proc.usage(own).cpu_s if worker.spared else used.cpu_s
        if worker.cpu_before_s is None:
            worker.cpu_before_s = cpu_s
        self._count(used.processes)
        if worker.spared:
            worker.count_waits(set(pids) - set(own))
        if cpu_s - worker.cpu_before_s > limits.wall_s:
            raise Passed(TIMEOUT, f"its processes used more than {limits.wall_s:g} s of CPU time")
        start = time.monotonic()
        if used.memory_bytes > limits.memory_bytes and start >= worker.measure_again_at:
            if proc.proportional_bytes(pids) > limits.memory_bytes:
                raise Passed(MEMORY, f"its processes hold more than {limits.memory_bytes / 2**30:g} GiB")
            now = time.monotonic()
            # It is slow: no more than a tenth of the time.
            worker.measure_again_at = now + 10 * (now - start)

    def _reap(self, worker: ForkedWorker) -> None:
        for pid, status in descendants.ended_children():
            if pid == worker.pid:
                worker.ended = status

    def _wait_for_end(self, worker: ForkedWorker) -> None:
        """Wait a moment for the exit status of a worker that has closed its pipe; it may also have closed it on purpose."""
        deadline = time.monotonic() + 0.2
        while worker.ended is None and time.monotonic() < deadline:
            self._reap(worker)
            time.sleep(0.001)
        self._drain(worker, False)

    def _end_what_was_left(self, worker: ForkedWorker) -> None:
        """Kill processes that the call has started and not waited for; the worker stays."""
        deadline = time.monotonic() + 5.0
        while left := set(proc.descendants(os.getpid())) - {worker.pid} - worker.spared:
            alive = proc.usage(left).processes
            descendants.kill(left)
            time.sleep(0.0005)
            self._reap(worker)
            if not alive and not left & set(proc.children(os.getpid())):
                return  # ended, and the worker has not waited for them yet
            if worker.ended is not None or time.monotonic() > deadline:
                self._end()
                return

    def _end(self) -> None:
        """Kill the worker with all its descendants."""
        worker, self._worker = self._worker, None
        if worker is not None:
            descendants.kill_group(worker.pid)
            descendants.kill([worker.pid])
            descendants.kill_all_descendants()
            for fd in (worker.requests, worker.replies, worker.output, worker.gate):
                if fd is not None:
                    os.close(fd)


def _send(fd: int, data: bytes) -> bytes:
    """Send what the pipe takes; returns the rest. A worker that has gone is noticed at its reply pipe."""
    try:
        return data[os.write(fd, data) :]
    except BlockingIOError:
        return data
    except BrokenPipeError:
        return b""


def _has_more(fd: int) -> bool:
    """Return True when there is something to read from ``fd``, which does not block."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return any(event & select.POLLIN for _, event in poller.poll(0))


def _ended(worker: ForkedWorker) -> Passed:
    if worker.ended is not None and os.WIFSIGNALED(worker.ended) and os.WTERMSIG(worker.ended) == signal.SIGXCPU:
        return Passed(TIMEOUT, "the kernel's limit of CPU time was reached")
    return Passed(CRASHED, f"{_how(worker.ended)}{_with_output(worker)}")


def _how(status: int | None) -> str:
    """Describe how a process ended, from its wait status."""
    if status is None:
        return "the process closed its pipe"
    if os.WIFSIGNALED(status):
        return f"the process was ended by {start.signal_name(os.WTERMSIG(status))}"
    return f"the process ended with exit code {os.WEXITSTATUS(status)}"


def _with_output(worker: ForkedWorker) -> str:
    text = worker.tail.decode(errors="replace").strip()
    fault = text.find("Fatal Python error")  # faulthandler's report: what was called last comes first
    text = text[fault:][:SHOWN_CHARACTERS] if fault >= 0 else text[-SHOWN_CHARACTERS:]
    return f"; it printed: {text}" if text else ""


if __name__ == "__main__":
    main()
