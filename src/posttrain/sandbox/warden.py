"""The process that watches boxes: started by ``boxes.py`` as a fresh Python, it runs one program after the other.

Frames come on stdin and go to stdout. It ends when stdin does, and what is in a box then ends with it.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import select
import selectors
import signal
import time
from contextlib import suppress
from typing import Any, Never

from posttrain.processes import proc
from posttrain.processes.frames import PipeClosed
from posttrain.sandbox import inside, kernel, view, walls
from posttrain.sandbox.messages import read_message, write_message

_REQUESTS, _REPLIES = 0, 1
_STATUS, _READY = 4, b"ready"  # in the boxed process, until its walls are up
_LOOK_EVERY_S = 0.02
# A boxed process that has not put up its walls by now never will.
_SETUP_S = 30.0


class NoBox(Exception):
    """The box could not be made. ``args``: the wall that failed, or "", and the reason."""


def main() -> None:
    os.chdir("/")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    view.runtime_files()  # looked for once, not in every box
    gc.freeze()
    while select.select([_REQUESTS], [], []):
        handler = os.fork()
        if handler == 0:
            _handle()
        if os.waitpid(handler, 0)[1]:
            os._exit(0)  # nothing more will come


def _handle() -> Never:
    """Read one request, run it, answer it. A process of its own, because a fork shows a program all memory of its parent: a
    warden that read frames itself would show it what other programs were given and what they answered."""
    code = 1
    try:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        header, pieces = read_message(_REQUESTS)
        try:
            reply, outputs = run(header, *pieces)
        except NoBox as error:
            wall, reason = error.args
            reply, outputs = {"wall": wall, "reason": reason}, []
        write_message(_REPLIES, reply, outputs)
        code = 0
    except PipeClosed:  # the scorer has gone
        pass
    finally:
        os._exit(code)


def run(request: dict[str, Any], source: bytes, stdin: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """Run a program in a box of its own; once per process, which changes its namespaces.

    Returns: how it ended, and what it wrote to stdout, to stderr and as its result.
    Raises: NoBox.
    """
    limits = walls.BoxLimits(**request["limits"])
    given = os.memfd_create("stdin")
    _write_all(given, stdin)
    os.lseek(given, 0, os.SEEK_SET)
    pipes = {name: os.pipe() for name in ("stdout", "stderr", "result", "status")}
    try:
        walls.leave(request["walls"])
    except walls.WallError as error:
        raise NoBox(*error.args) from error
    number, ends = os.getpid(), [given, *(end for _, end in pipes.values())]
    pid = os.fork()
    if pid == 0:
        _begin(request, limits, source.decode(errors="replace"), ends, number)
    for fd in ends:
        os.close(fd)
    reads = {name: end for name, (end, _) in pipes.items()}
    try:
        _wait_for_walls(reads["status"])
        return _watch(pid, reads, limits)
    finally:
        _clear_up()


def _begin(request: dict[str, Any], limits: walls.BoxLimits, source: str, ends: list[int], number: int) -> Never:
    """Put up the walls and run, in the new process."""
    try:
        _own_files(ends)
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            walls.shut(request["walls"], limits, request["readable"], number)
        except walls.WallError as error:
            os.write(_STATUS, json.dumps(error.args).encode())
        except OSError as error:
            os.write(_STATUS, json.dumps(["", str(error)]).encode())
        else:
            os.write(_STATUS, _READY)  # fails when the warden has gone
            os.close(_STATUS)
            inside.run(source, request["function"], request["arguments"])
    finally:
        os._exit(1)


def _own_files(ends: list[int]) -> None:
    """Keep stdin, stdout, stderr, the result and the status, as files 0 to 4, and nothing else."""
    for number, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in ends]):
        os.dup2(fd, number)
    os.closerange(len(ends), 1 << 16)


def _wait_for_walls(status: int) -> None:
    """Raises: NoBox."""
    deadline = time.monotonic() + _SETUP_S
    said = b""
    while said != _READY:
        if not select.select([status], [], [], max(deadline - time.monotonic(), 0))[0]:
            raise NoBox("", f"the walls were not up within {_SETUP_S:g} s")
        got = os.read(status, 1 << 12)
        said += got
        if not got:
            raise NoBox(*(json.loads(said) if said else ("", "the boxed process died while it put up its walls")))


def _watch(pid: int, reads: dict[str, int], limits: walls.BoxLimits) -> tuple[dict[str, Any], list[bytes]]:
    start, waited_before = time.monotonic(), proc.core_wait_s(pid)
    waited_s, deadline = 0.0, start + limits.timeout_s
    outputs = {name: bytearray() for name in ("stdout", "stderr", "result")}
    ended, code = "", None
    with selectors.DefaultSelector() as selector:
        for name in outputs:
            os.set_blocking(reads[name], False)
            selector.register(reads[name], selectors.EVENT_READ, name)
        selector.register(_REQUESTS, selectors.EVENT_READ, "")
        look = start + _LOOK_EVERY_S
        process = os.pidfd_open(pid)
        selector.register(process, selectors.EVENT_READ, "process")
        try:
            while not ended:
                now = time.monotonic()
                if now >= deadline:
                    waited_s = proc.core_wait_s(pid) - waited_before
                    deadline = start + min(limits.timeout_s + waited_s, limits.wall_s)
                    if now >= deadline:
                        ended = "timeout"
                        break
                for key, _ in selector.select(min(deadline, max(look, now)) - now + 0.0005):
                    if key.data == "":
                        raise PipeClosed  # the scorer has gone
                    if key.data == "process":
                        waited_s = proc.core_wait_s(pid) - waited_before
                        code = os.waitpid(pid, 0)[1]
                        ended = "exit" if os.WIFEXITED(code) else "signal"
                    elif not _drain(reads[key.data], outputs[key.data], limits.output_bytes):
                        selector.unregister(reads[key.data])
                    elif len(outputs[key.data]) > limits.output_bytes:
                        ended = "output"
                if time.monotonic() >= look and not ended:
                    look = time.monotonic() + _LOOK_EVERY_S
                    ended = "threads" if proc.threads_of(pid) > limits.threads else ""
        finally:
            os.close(process)
    if ended in ("exit", "signal"):
        for name, got in outputs.items():  # what is still in the pipes
            while len(got) <= limits.output_bytes and _drain(reads[name], got, limits.output_bytes, once=True):
                pass
        if any(len(got) > limits.output_bytes for got in outputs.values()):
            ended = "output"
    number = None if code is None else os.waitstatus_to_exitcode(code)
    header = {"ended": ended, "code": number, "wall_s": time.monotonic() - start, "waited_s": waited_s}
    return header, [bytes(got[: limits.output_bytes]) for got in outputs.values()]


def _drain(fd: int, into: bytearray, most: int, *, once: bool = False) -> bool:
    """Read available output. Returns False at its end (with ``once``: also when there is none now)."""
    try:
        got = os.read(fd, 1 << 16)
    except BlockingIOError:
        return not once
    into += got
    return bool(got)


def _clear_up() -> None:
    """Kill the processes left in the box, and wait until all are gone. The first process of a pid namespace is gone
    when all of them are; elsewhere orphans come to this process, their subreaper, and are its children in the next round."""
    while True:
        for pid in proc.children(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
