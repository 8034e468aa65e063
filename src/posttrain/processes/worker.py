"""The process that runs calls: forked by a keeper, killed and replaced by it when a limit is passed."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import hashlib
import importlib
import os
import random
import signal
import socket
import sys
import time
from _thread import _count as thread_count  # also of threads that threading does not know
from collections.abc import Callable
from typing import Any, Never

from posttrain.errors import RequestError
from posttrain.processes import fork_gate, proc, wire
from posttrain.processes.frames import PipeClosed, read_frame, write_frame
from posttrain.processes.limits import EXCEPTION, MEMORY, Limits, more_cpu, put_limits

# From a call to an answer, both made of what wire.py can write. With a method after_fork(), that is called in each worker.
Handler = Callable[[Any], Any]

# First byte of what a worker sends, and of what its keeper passes on. The rest is JSON.
ANSWERS = (
    b"A"  # [[ANSWER, value] or [FAILURE, [reason, detail]], …], of the first call to that where the worker stopped
)
ANSWERS_AND_REPLACE = b"a"  # the last call left something behind that could disturb the next one
FAILURE = b"F"  # [reason, detail], of the request as a whole
ANSWER = b"A"
PROBLEMS = b"P"  # loading failed: [[what, fix, where, field], …]
READY = b"R"
CANNOT_FORK = b"N"  # loading has started threads or processes, which a fork would not take along, or made shared locks

MOST_REQUEST_BYTES = 1 << 30
NUMBER_BYTES = 8  # of a request, before it and before its answer: whatever else is in the pipe answers nothing
TOGETHER_S = 0.01  # after which the rest of a request's calls is left to other workers


def load(factory: str, setup: Any) -> Handler:
    """The handler made by ``factory``, "package.module:function", of ``setup``. Raises whatever it raises."""
    module, _, name = factory.partition(":")
    handler: Handler = getattr(importlib.import_module(module), name)(setup)
    return handler


def fork_in_pools() -> None:
    """Make ``multiprocessing`` fork where a user's pool asks for "spawn" or "forkserver", from now on.

    For a worker's process, which has one thread: a new Python would not find the modules that this one has made for the
    user's file, and each of its processes would fail before the first task, for ever replaced by the pool.
    """
    from multiprocessing import context

    contexts: dict[str, Any] = context._concrete_contexts  # type: ignore[attr-defined]  # by the names of start methods
    contexts |= dict.fromkeys(contexts, contexts["fork"])


def has_shared_locks() -> bool:
    """Return True when loading has made locks between processes, as a pool of processes does.

    Forks share them: a worker that is killed while one of its processes holds such a lock would leave it locked for ever.
    """
    locks = sys.modules.get("multiprocessing.synchronize")
    return locks is not None and any(isinstance(each, locks.SemLock) for each in gc.get_objects())


def problems_of(error: BaseException) -> bytes:
    """A frame with the problems that loading has met."""
    if isinstance(error, RequestError):
        problems = [[each.what, each.fix, each.where, each.field] for each in error.problems]
    else:
        problems = [[f"loading in a worker failed: {said(error)}", "", "", ""]]
    return PROBLEMS + wire.to_bytes(problems)


def said(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= 500 else f"{text[:500]}…"


def serve(
    make: Callable[[], Handler], requests: int, replies: int, output: int, gate: socket.socket, limits: Limits
) -> None:
    """Answer requests from one pipe into another until killed, or until the keeper has gone.

    Args: make gives the handler: loaded already, or loaded now.
    """
    _use_as_output(output)
    faulthandler.enable()
    with contextlib.suppress(PipeClosed):
        try:
            handler = make()
            # Processes that it starts stay until the worker ends.
            if begin := getattr(handler, "after_fork", None):
                begin()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - reported; the keeper ends this process
            write_frame(replies, problems_of(error))
            return
        put_limits(limits, proc.address_space_bytes())
        fork_gate.hand_over(gate, fork_gate.close_gate())
        write_frame(replies, READY)
        _serve(handler, requests, replies, limits)


def _serve(handler: Handler, requests: int, replies: int, limits: Limits) -> Never:
    home, threads, worker = os.getcwd(), thread_count(), os.getpid()
    gc.freeze()  # what is loaded stays; the collector need not touch, and so copy, the pages shared with the keeper
    while True:
        data = read_frame(requests, MOST_REQUEST_BYTES)
        number, calls = data[:NUMBER_BYTES], wire.from_bytes(data[NUMBER_BYTES:])
        more_cpu(limits)
        kind, answers, begun = ANSWERS, [], time.monotonic()
        for shared, each in ((shared, each) for shared, alike in calls for each in alike):
            _seed(each["seed"])
            answer, replace = _answer(handler, {**shared, **each["call"]} if shared else each["call"])
            if os.getpid() != worker:  # a call has forked, and its child came back too: only one of them may answer
                os._exit(0)
            signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that was set must not ring in a later call
            os.chdir(home)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            answers.append(answer)
            if replace or thread_count() > threads:
                kind = ANSWERS_AND_REPLACE
                break
            if time.monotonic() - begun > TOGETHER_S:
                break
        write_frame(replies, number + kind + b"[" + b",".join(answers) + b"]")


def _answer(handler: Handler, call: Any) -> tuple[bytes, bool]:
    """Call the handler. Returns: its answer as an item of ANSWERS, and True when the worker is to be replaced."""
    try:
        return b'["%b",%b]' % (ANSWER, wire.to_bytes(handler(call))), False
    except MemoryError as error:
        failure = [MEMORY, said(error)]
    except BaseException as error:  # noqa: BLE001 - KeyboardInterrupt raised by a call is the call's failure as well
        failure = [EXCEPTION, said(error)]
    return b'["%b",%b]' % (FAILURE, wire.to_bytes(failure)), True


def _seed(seed: int | str) -> None:
    """Give a call the same random numbers in every run and in every worker. Args: seed, or a name to derive it from."""
    if isinstance(seed, str):
        seed = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=4).digest(), "little")
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def _use_as_output(output: int) -> None:
    """Send stdout and stderr to the keeper, line by line; stdin is empty."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(fd, target)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - they stay open as long as the process lives
    sys.stdout = open(1, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
