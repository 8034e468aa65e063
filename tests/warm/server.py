"""Forks processes that have torch, transformers and posttrain imported already, which would take each 5 s of CPU time.

Run as ``python server.py LISTENER LIFE``, the numbers of two open files: a Unix socket that listens, and the read end of a pipe
whose other end closes when the tests are over. Each connection asks for one process (``client.py``) and is open as long as that
lives.

A process that was forked here differs from one that was started in three things: it shares the seed of Python's hashes with the
others, libraries have read their environment variables in the server, and its parent is the server. A test that such things
matter to starts a process as users do, by ``subprocess``: the workers of Ray that this starts are not warm either.
"""

from __future__ import annotations

import array
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
import types
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from warm.client import SOCKET, STAND_IN, WARM_CHILDREN

sys.path.pop()  # which no process is to have

# What workers and commands need. Not Ray, which reads what a worker is told (RAY_JOB_ID) when it is imported. None may start a
# thread: it would not be there in a forked process, and what it had locked would be locked forever.
IMPORTS = (
    "posttrain.build.train",
    "posttrain.build.sft",
    "posttrain.build.tune",
    "posttrain.cli.app",
    "posttrain.backends.runtime.inprocess",
    "posttrain.backends.torch_training.start",
    "posttrain.backends.train.fsdp",
    "posttrain.backends.rollout.native",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
)
# megatron would import it. It makes a temporary folder then, which the first forked process to end would take from all others.
EACH_ITS_OWN = ("wandb",)
REQUEST_BYTES = 1 << 20
MOST_FILES = 8  # standard input, output and errors, and others
FREE = 100  # no file of a process has a number as large as this


def serve(listener: socket.socket, life: int) -> dict[str, Any] | None:
    """Answer until the tests are over. Returns: in a forked process what it was asked to be; None in the server at its end."""
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    waiting: dict[int, socket.socket] = {}  # by the process that the connection has asked for
    while True:
        ready, _, _ = select.select([listener, life, wake, *waiting.values()], [], [])
        if life in ready:
            for pid in waiting:
                _kill(pid)
            return None
        if wake in ready:
            with suppress(BlockingIOError):
                wake.recv(4096)
            _tell_ends(waiting)
        for pid in [pid for pid, connection in waiting.items() if connection in ready]:
            _kill(pid)  # nobody waits for it any more: its connection says nothing, so it can only have closed
            os.waitpid(pid, 0)
            waiting.pop(pid).close()
        if listener in ready:
            connection, _ = listener.accept()
            request, files = _received(connection)
            if request is None:
                connection.close()
                continue
            _import(request["imports"])
            pid = os.fork()
            if pid == 0:
                for each in (listener, connection, wake, woken, *waiting.values()):
                    each.close()
                os.close(life)
                return request | {"files": files}
            for file in files:
                os.close(file)
            waiting[pid] = connection
            with suppress(OSError):
                connection.sendall(json.dumps({"pid": pid}).encode() + b"\n")


def _import(names: Iterable[str]) -> None:
    """Import modules, for whose imports some libraries seem not to be installed."""
    for name in EACH_ITS_OWN:
        sys.modules[name] = None  # type: ignore[assignment]  # an import of it is an ImportError
    for name in names:
        importlib.import_module(name)
    for name in EACH_ITS_OWN:
        del sys.modules[name]


def _received(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The request and the files that came with it; None when the other side has gone."""
    files = array.array("i")
    text = b""
    while not text.endswith(b"\n"):
        part, besides, _, _ = connection.recvmsg(REQUEST_BYTES, socket.CMSG_SPACE(MOST_FILES * files.itemsize))
        for _, _, data in besides:
            files.frombytes(data)
        if not part:
            return None, []
        text += part
    return json.loads(text), list(files)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _tell_ends(waiting: dict[int, socket.socket]) -> None:
    """Say how processes have ended to those who wait for them, and forget them."""
    for pid in list(waiting):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            connection = waiting.pop(pid)
            with suppress(OSError):
                connection.sendall(json.dumps({"ended": os.waitstatus_to_exitcode(status)}).encode() + b"\n")
            connection.close()


def become(request: dict[str, Any]) -> None:
    """Take on what makes up a process: files, session, folder, environment, arguments, signals, random states."""
    files = [fcntl.fcntl(file, fcntl.F_DUPFD, FREE) for file in request["files"]]
    for file in request["files"]:
        os.close(file)
    for number, file in zip(request["numbers"], files, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.setsid()  # a group that is killed because of this process must not be the tests'
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    signal.set_wakeup_fd(-1)
    for number, handler in ((signal.SIGCHLD, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        signal.signal(number, handler)
    if WARM_CHILDREN in os.environ:
        sys.executable = str(Path(os.environ[SOCKET]).with_name(STAND_IN))
    sys.argv = request["arguments"]
    sys.orig_argv = [sys.executable, *request["arguments"]]
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
    for number, name in ((1, "stdout"), (2, "stderr")):
        unbuffered = number == 2 or os.isatty(number) or "PYTHONUNBUFFERED" in os.environ
        raw = io.FileIO(number, "w", closefd=False)
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", line_buffering=unbuffered))
    sys.stderr.reconfigure(errors="backslashreplace")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    import numpy as np

    np.random.seed(None)  # Python's own generator sees to that itself; torch's has the same first state everywhere


def run(request: dict[str, Any]) -> None:
    """What ``python`` does with its arguments: ``-c CODE``, ``-m MODULE`` or a script."""
    first, *rest = request["arguments"]
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path[0] = ""
        _as_main(compile(rest[0], "<string>", "exec"))
    elif first == "-m":
        sys.argv = rest
        sys.path[0] = os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(first).resolve().parent)
        _as_main(compile(Path(first).read_bytes(), first, "exec"), __file__=first)


def _as_main(code: types.CodeType, **names: str) -> None:
    """Run the code of a script in a module that is the main one, for multiprocessing too, which has another name for it."""
    module = types.ModuleType("__main__")
    vars(module).update(names)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    exec(code, vars(module))  # noqa: S102  # a test's


if __name__ == "__main__":
    _import(IMPORTS)
    gc.collect()
    gc.freeze()
    asked = serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    if asked is not None:
        become(asked)
        run(asked)
