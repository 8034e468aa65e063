"""The process that forks many workers from one that has loaded what they need. Started by ``forks.py`` as ``-m ... FD SETUP``.

FD is a socket that keeps messages apart; SETUP is JSON: ``module``, which has ``preload(names, own, modules, tools)`` and
``serve(fd)``, the ``names``, ``own``, ``modules`` and ``tools`` to load, and ``memory_bytes`` of a worker. The first message
says READY, or CANNOT_FORK when loading has started threads or processes. Then "fork", with the worker's socket, is answered by
its pid; "kill PID" ends a worker with all that it has started; "reap PID" is for one that has closed its socket, and leaves it
a moment to end by itself. Both are answered by its wait status, and OVER_MEMORY behind it where that is why it was killed. The
server ends, with everything below it, when its socket or its parent does.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import select
import socket
import sys
import time
from collections.abc import Callable

from posttrain.processes import descendants, proc, start

READY, CANNOT_FORK = b"R", b"N"
OVER_MEMORY = "memory"
GRACE_S = 0.5  # for a worker that has closed its socket to end
LOOK_EVERY_S = 0.25  # how often the workers' memory is counted


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    setup, parent = json.loads(sys.argv[2]), os.getppid()
    module = importlib.import_module(setup["module"])
    descendants.die_with_parent(parent)  # while the user's files are imported, which may take for ever
    module.preload(setup["names"], setup["own"], setup["modules"], setup["tools"])
    descendants.outlive_parent()
    if setup["own"] and (proc.thread_count() > 1 or descendants.has_children()):
        control.send(CANNOT_FORK)
        return
    descendants.adopt_orphans()
    gc.collect()
    gc.freeze()  # the collector need not touch, and so copy, the pages that workers share
    control.send(READY)
    _ForkServer(control, module.serve, setup["memory_bytes"], parent).run()
    descendants.kill_all_descendants()
    os._exit(0)


class _ForkServer:
    def __init__(self, control: socket.socket, serve: Callable[[int], object], memory_bytes: int, parent: int):
        self._control = control
        self._serve = serve
        self._memory_bytes = memory_bytes
        self._parent = parent
        self._workers: set[int] = set()
        self._ended: dict[int, int] = {}  # wait statuses
        self._over_memory: set[int] = set()

    def run(self) -> None:
        """Answer until the socket ends, or the parent does, of which a fork may hold the socket open."""
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        look = time.monotonic() + LOOK_EVERY_S
        while True:
            asked = poller.poll(max(look - time.monotonic(), 0.0) * 1000 + 1)
            if time.monotonic() >= look:
                if os.getppid() != self._parent:
                    return
                self._look()
                look = time.monotonic() + LOOK_EVERY_S
            if not asked:
                continue
            message, fds, _, _ = socket.recv_fds(self._control, 64, 1)
            if not message:
                return
            word, _, number = message.decode().partition(" ")
            if word == "fork":
                answer = str(self._fork(fds[0]))
            else:
                pid = int(number)
                status = self._end(pid, GRACE_S if word == "reap" else 0.0)
                answer = f"{status} {OVER_MEMORY}" if pid in self._over_memory else f"{status}"
                self._over_memory.discard(pid)
            self._control.send(answer.encode())

    def _fork(self, fd: int) -> int:
        def work() -> None:
            self._control.close()
            start.use_no_terminal()
            limit_data(self._memory_bytes)
            self._serve(fd)

        pid = start.fork(work)
        os.close(fd)
        self._workers.add(pid)
        return pid

    def _look(self) -> None:
        """Kill workers that hold too much memory together with their descendants; their sockets close."""
        for pid in self._workers - self._over_memory:
            below = [pid, *proc.descendants(pid)]
            if proc.usage(below).memory_bytes > self._memory_bytes and (
                proc.proportional_bytes(below) > self._memory_bytes
            ):
                self._over_memory.add(pid)
                descendants.kill_group(pid)
                descendants.kill(below)

    def _end(self, pid: int, grace_s: float) -> int:
        """Kill a worker and what it has started; its wait status, its own where it has ended by itself within ``grace_s``."""
        below = proc.descendants(pid)
        deadline = time.monotonic() + grace_s
        while not self._reaped(pid) and time.monotonic() < deadline:
            time.sleep(0.002)
        while not self._reaped(pid):
            descendants.kill_group(pid)
            descendants.kill([pid])
            time.sleep(0.001)
        self._workers.discard(pid)
        # Processes that it had started are the server's now, unless they have been killed with the group.
        descendants.kill([each for each in (*below, *proc.children(os.getpid())) if each not in self._workers])
        return self._ended.pop(pid)

    def _reaped(self, pid: int) -> bool:
        self._ended.update(descendants.ended_children())
        return pid in self._ended


def limit_data(memory_bytes: int) -> None:
    """Let this process allocate so much beyond what it holds: the kernel refuses more at once, while the count comes too late
    for a process that asks for gigabytes in a quarter of a second. Reserved address space does not count, nor do files."""
    limit = proc.data_bytes() + memory_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


if __name__ == "__main__":
    main()
