"""The trainer's side of reward workers: a call gives a future of an answer or of a typed failure."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import IO, Any

from posttrain.errors import ConfigError, Problem
from posttrain.processes import descendants, frames, proc, start, wire
from posttrain.processes.environment import Kind, variables_for
from posttrain.processes.limits import CRASHED, EXCEPTION, OUTPUT_LIMIT, TIMEOUT, Limits
from posttrain.processes.replies import Replies
from posttrain.processes.waiting import Waiting, WaitingCalls, frame_of
from posttrain.processes.worker import ANSWER, ANSWERS, CANNOT_FORK, FAILURE, PROBLEMS, READY

MARK = "POSTTRAIN_WORKER"  # environment variable of a keeper and of all below it
GRACE_S = 5.0  # how much later than the keeper's own deadline it is taken for dead


@dataclass(frozen=True, slots=True)
class Answer:
    value: Any  # made of JSON's kinds and those of wire.py


@dataclass(frozen=True, slots=True)
class CallFailure:
    reason: str  # a word of limits.py
    detail: str


Reply = Answer | CallFailure
_ANSWER = ANSWER.decode()
_CLOSED = CallFailure(CRASHED, "the workers were closed")


class WorkerPool:
    """Workers that answer calls, each behind a keeper.

    Args: ``factory``, "package.module:function", makes the handler of calls in every keeper, of ``setup``; both the setup and
    the calls are values that wire.py can write. Workers see the environment variables of ``Kind.USER_CODE`` and those called
    ``variables``, less those called ``withheld``.

    The constructor starts the processes and returns; ``check`` waits until one has loaded. ``close`` ends them all; so does
    the end of this process, however it comes.

    Raises: ConfigError where processes cannot be watched: on a Linux without /proc.
    """

    def __init__(
        self,
        factory: str,
        setup: Any,
        *,
        workers: int,
        limits: Limits,
        variables: Collection[str] = (),
        withheld: Collection[str] = (),
    ):
        if proc.LINUX and not proc.is_mounted():
            what = "the processes that run rewards cannot be watched and ended here: /proc is not mounted"
            raise ConfigError(Problem(what, fix="mount it: mount -t proc proc /proc"))
        self._waiting: Waiting[Reply] = Waiting(workers)
        mark = uuid.uuid4().hex
        self._lines = [
            _Line(factory, setup, limits, f"{mark}.{number}", variables, withheld) for number in range(workers)
        ]
        self._threads = [
            threading.Thread(target=self._serve, args=(line,), name=f"worker-{number}", daemon=True)
            for number, line in enumerate(self._lines)
        ]
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        """Wait until the first worker has loaded.

        Raises: ConfigError when it could not.
        """
        self._lines[0].loaded.result()

    def submit(self, call: Any, *, seed: int = 0) -> Future[Reply]:
        """Have a worker run the handler on ``call``, with Python's and NumPy's global generators at ``seed``.

        The future never raises: its result is an Answer or a CallFailure. Calls begin in the order of submission. Short ones
        cross together; where something happens to a worker meanwhile, each of them is made again, alone.
        """
        future: Future[Reply] = Future()
        try:
            replies = self.submit_written([wire.to_text(call)], [seed])
        except (TypeError, ValueError, RecursionError) as error:
            future.set_result(CallFailure(EXCEPTION, str(error)))
        else:
            replies.watch(lambda _, reply: future.set_result(reply))
        return future

    def submit_written(self, calls: Sequence[str], seeds: Sequence[int | str], shared: str = "null") -> Replies[Reply]:
        """``submit`` many calls that are written by wire.py already.

        Args: seeds, of each call a number, or a name to derive it from; shared, a mapping in the same form, whose entries are
            added to each call, which then is a mapping: a worker reads them once for calls that cross together.
        """
        replies: Replies[Reply] = Replies(len(calls))
        requests = [
            f'{{"call": {call}, "seed": {wire.to_text(seed)}}}'.encode()
            for call, seed in zip(calls, seeds, strict=True)
        ]
        waiting = WaitingCalls(requests, shared.encode(), replies)
        if not self._waiting.put(waiting):
            waiting.answer([_CLOSED] * len(waiting))
        return replies

    def close(self) -> None:
        """End the workers, also in the middle of a call; calls that were not answered fail as crashed."""
        left = self._waiting.close()
        for line in self._lines:
            line.hang_up()
        for thread in self._threads:
            thread.join()
        for calls in left:
            calls.answer([_CLOSED] * len(calls))

    def _serve(self, line: _Line) -> None:
        """One thread per worker: it waits, and others run meanwhile."""
        line.start()
        while calls := self._waiting.take():
            began = time.monotonic()
            try:
                replies: list[Reply] | CallFailure = line.call(calls)
            except Exception as error:  # noqa: BLE001 - every future must get its result, also on a broken machine
                replies = CallFailure(CRASHED, f"the worker cannot be reached: {type(error).__name__}: {error}"[:500])
                with suppress(Exception):
                    line.end()  # what it would still say is not the answer to the next call
            if isinstance(replies, CallFailure):
                replies = [replies] if sum(map(len, calls)) == 1 else []
            told = 0
            for each in calls:
                each.answer(replies[told : told + len(each)])
                told += len(each)
            for each in self._waiting.answered(calls, len(replies), time.monotonic() - began):
                each.answer([_CLOSED] * len(each))
        line.end()


class _Line:
    """The connection to one keeper, which is started again when it is gone."""

    def __init__(
        self,
        factory: str,
        setup: Any,
        limits: Limits,
        mark: str,
        variables: Collection[str],
        withheld: Collection[str],
    ):
        self._setup = {"factory": factory, "setup": setup, "limits": asdict(limits), "load_in_worker": False}
        self._limits = limits
        self._mark = mark
        self._variables, self._withheld = frozenset(variables), frozenset(withheld)
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None
        self._lock = threading.Lock()
        self._hung_up = False
        self.loaded: Future[None] = Future()  # raises ConfigError when loading failed

    def start(self) -> None:
        """Start the keeper and wait until it has loaded. What goes wrong is in ``loaded``."""
        try:
            self._start()
        except Exception as error:  # noqa: BLE001 - ``check`` waits for it
            if not isinstance(error, ConfigError):
                error = ConfigError(f"a worker for rewards cannot be started: {type(error).__name__}: {error}")
            if not self.loaded.done():
                self.loaded.set_exception(error)
        else:
            if not self.loaded.done():
                self.loaded.set_result(None)

    def _start(self) -> None:
        """Raises: ConfigError."""
        reply = self._spawn()
        if reply[:1] == CANNOT_FORK:
            self._setup["load_in_worker"] = True
            self.end()
            reply = self._spawn()
        if reply[:1] == READY:
            return
        self.end()
        assert reply[:1] == PROBLEMS
        raise ConfigError(
            [Problem(what, fix=fix, where=where, field=field) for what, fix, where, field in wire.from_bytes(reply[1:])]
        )

    def _spawn(self) -> bytes:
        """A new keeper; the first that it says. Raises: ConfigError when it says nothing."""
        variables = variables_for(Kind.USER_CODE, named=self._variables, withheld=self._withheld)
        with self._lock:
            if self._hung_up:
                raise ConfigError("the workers were closed")
            try:
                self._said = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the keeper lives
                self._process = start.start(
                    start.module_command("posttrain.processes.keeper"),
                    environment={**variables, **start.ONE_THREAD, **start.module_path(), MARK: self._mark},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._said,
                )
            except OSError as error:
                raise ConfigError(f"a worker for rewards cannot be started: {error}") from error
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)  # a stopped keeper reads nothing: writing has a deadline
        try:
            self._write(wire.to_bytes({**self._setup, "sys_path": sys.path}), self._limits.load_s + GRACE_S)
            return self._read(self._limits.load_s + GRACE_S)
        except (frames.PipeClosed, frames.FrameTooLong, TimeoutError) as error:
            said = self._last_words()
            self.end()
            how = "did not load in time" if isinstance(error, TimeoutError) else "ended while it was loading"
            raise ConfigError(f"a worker for rewards {how}{said}") from error

    def call(self, calls: Sequence[WaitingCalls[Reply]]) -> list[Reply] | CallFailure:
        """Make calls. Returns: the replies to the first of them, one at least, or what happened to the worker."""
        if self._process is None:
            try:
                self._start()
            except ConfigError as error:
                return CallFailure(CRASHED, f"a new worker could not be made: {error}"[:500])
        # A killed worker loads before it answers
        load_s = self._limits.load_s if self._setup["load_in_worker"] else 0.0
        try:
            self._write(frame_of(calls), self._limits.wall_s + GRACE_S)
            reply = self._read(self._limits.longest_s + load_s + GRACE_S)
        except (frames.PipeClosed, frames.FrameTooLong) as error:
            said = self._last_words()
            self.end()
            return CallFailure(CRASHED, f"the process that watches the worker was ended ({type(error).__name__}){said}")
        except TimeoutError:
            self.end()
            return CallFailure(TIMEOUT, "the process that watches the worker does not answer")
        except OSError as error:
            self.end()
            return CallFailure(CRASHED, f"the process that watches the worker cannot be reached: {error}")
        return _replies(reply, sum(map(len, calls)))

    def _write(self, data: bytes, timeout_s: float) -> None:
        assert self._process is not None and self._process.stdin is not None
        frames.write_frame(self._process.stdin.fileno(), data, timeout_s)

    def _read(self, timeout_s: float) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        most = self._limits.answer_bytes + 4096
        return frames.read_frame(self._process.stdout.fileno(), most, timeout_s)

    def _last_words(self) -> str:
        """The end of the keeper's output: the error of a module that ended it."""
        assert self._said is not None
        end = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(end - 1000, 0))
        text = self._said.read().decode(errors="replace").strip()
        return f"; it printed: {text}" if text else ""

    def hang_up(self) -> None:
        """Make a call that is in progress end; for another thread."""
        with self._lock:
            self._hung_up = True
            if self._process is not None:
                self._process.kill()

    def end(self) -> None:
        """Kill the keeper and everything below it."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            return
        process.kill()
        process.wait()
        descendants.kill_marked(MARK, self._mark)
        for stream in (process.stdin, process.stdout, self._said):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        with self._lock:
            self._process = None


def _replies(data: bytes, most: int) -> list[Reply] | CallFailure:
    """Check and convert a frame of a worker; never raises."""
    try:
        value = wire.from_bytes(data[1:])
        if data[:1] == ANSWERS and 1 <= len(value) <= most:
            return [_reply(kind, said) for kind, said in value]
        if data[:1] == FAILURE:
            return _failure(value)
    except (AttributeError, TypeError, ValueError, UnicodeError) as error:
        return CallFailure(CRASHED, f"the worker's answer cannot be read: {error}"[:500])
    return CallFailure(OUTPUT_LIMIT, "the worker's answer is of no known kind")


def _reply(kind: str, said: Any) -> Reply:
    return Answer(said) if kind == _ANSWER else _failure(said)


def _failure(said: Any) -> CallFailure:
    reason, detail = said
    return CallFailure(str(reason), str(detail))
