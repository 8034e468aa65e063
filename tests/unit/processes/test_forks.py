"""Workers forked from a process that has loaded what they need."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from posttrain.errors import RunStopped
from posttrain.processes import proc
from posttrain.processes.environment import Kind, variables_for
from posttrain.processes.forks import ForkServer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="descendants are found by way of /proc")

MODULE = """
import os, socket, subprocess, time
LOADED = []

def preload(names, own, modules, tools):
    if "dies" in own:
        os._exit(7)
    LOADED.extend([*names, *own])

def serve(fd):
    with socket.socket(fileno=fd) as control:
        while word := control.recv(64).decode():
            if word == "loaded":
                control.send(" ".join(LOADED).encode() or b"-")
            elif word == "child":
                left = subprocess.Popen(["sleep", "600"], start_new_session=True)
                control.send(str(left.pid).encode())
            elif word == "exit":
                os._exit(3)
            elif word == "take":
                control.send(str(len(bytes(1 << 30))).encode())
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ForkServer]]:
    (tmp_path / "served_by_the_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    servers: list[ForkServer] = []

    def make(own: tuple[str, ...] = ()) -> ForkServer:
        server = ForkServer(
            "the server",
            "served_by_the_test",
            names=["a"],
            own=own,
            memory_bytes=256 << 20,
            variables=variables_for(Kind.USER_CODE),
        )
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.close()


def answer(worker: socket.socket, word: str) -> str:
    worker.settimeout(20)
    worker.send(word.encode())
    return worker.recv(64).decode()


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while proc.state(pid) != "gone" and time.monotonic() < deadline:
        time.sleep(0.005)
    return proc.state(pid) == "gone"


def test_workers_share_what_was_loaded_and_end_with_all_that_they_started(made: Callable[..., ForkServer]) -> None:
    server = made(("b",))
    pid, worker = server.fork()
    other, _ = server.fork()
    with worker:
        assert answer(worker, "loaded") == "a b"
        child = int(answer(worker, "child"))
        assert proc.state(child) == "running"
        end = server.kill(pid)
    assert (end.code, end.over_memory, str(end)) == (-signal.SIGKILL, False, "signal SIGKILL")
    assert gone(pid) and gone(child) and proc.state(other) == "running"


def test_a_worker_that_ends_by_itself_says_how(made: Callable[..., ForkServer]) -> None:
    server = made()
    pid, worker = server.fork()
    with worker:
        assert answer(worker, "exit") == ""
    assert str(server.reap(pid)) == "exit code 3"


def test_a_worker_cannot_take_more_memory_than_it_may(made: Callable[..., ForkServer]) -> None:
    server = made()
    pid, worker = server.fork()
    with worker:
        assert answer(worker, "take") == ""  # MemoryError, which nothing catches
    assert server.reap(pid).code == 1


def test_loading_that_ends_the_server_is_left_to_the_workers(made: Callable[..., ForkServer]) -> None:
    server = made(("dies",))
    _, worker = server.fork()
    with worker:
        assert answer(worker, "loaded") == "a"


def test_a_server_that_was_killed_is_named(made: Callable[..., ForkServer]) -> None:
    server = made()
    pid, worker = server.fork()
    assert server._process is not None
    os.kill(server._process.pid, signal.SIGKILL)
    with pytest.raises(RunStopped, match=r"the server \(process \d+\) has ended"):
        server.fork()
    worker.close()
    assert gone(pid)  # workers die with it
