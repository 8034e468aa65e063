"""Forks workers. Started by ``processes.py`` as ``python -m posttrain.backends.environments.server FD NAMES``.

FD is a socket that keeps messages apart; NAMES are environments of the registry, with commas, whose libraries are imported
before the first fork. "fork", with the worker's socket, is answered by its pid. "kill PID" ends a worker with all that it has
started; "reap PID" is for one that has closed its socket, and leaves it a moment to end by itself. Both are answered by how it
ended (its wait status). The server ends, with everything below it, when its socket does.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import time

from posttrain.backends.environments.make import builder_of
from posttrain.backends.environments.worker import serve
from posttrain.processes import descendants

GRACE_S = 0.5


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    descendants.adopt_orphans()
    for name in filter(None, sys.argv[2].split(",")):
        with contextlib.suppress(Exception):  # an episode that needs it says what is wrong with it
            builder_of(name)
    gc.freeze()  # the collector need not touch, and so copy, what the workers share
    server = os.getpid()
    workers: set[int] = set()
    ended: dict[int, int] = {}  # wait statuses
    while True:
        message, fds, _, _ = socket.recv_fds(control, 64, 1)
        if not message:
            break
        if message == b"fork":
            pid = os.fork()
            if pid == 0:
                control.close()
                serve(fds[0], server)
            os.close(fds[0])
            workers.add(pid)
        else:
            pid = int(message.split()[1])
            status = end(pid, workers, ended, GRACE_S if message.startswith(b"reap") else 0.0)
            control.send(str(status).encode())
            continue
        control.send(str(pid).encode())
    descendants.kill_all_descendants()
    os._exit(0)


def end(pid: int, workers: set[int], ended: dict[int, int], grace_s: float) -> int:
    """Kill a worker and what it has started; its wait status, its own where it has ended by itself within ``grace_s``."""
    below = descendants.descendants(pid)
    deadline = time.monotonic() + grace_s
    while not _reaped(pid, ended) and time.monotonic() < deadline:
        time.sleep(0.002)
    while not _reaped(pid, ended):
        descendants.kill_group(pid)
        descendants.kill([pid])
        time.sleep(0.001)
    workers.discard(pid)
    # What it had started is the server's now, unless it has been killed with the group.
    descendants.kill([each for each in (*below, *descendants.children(os.getpid())) if each not in workers])
    return ended.pop(pid)


def _reaped(pid: int, ended: dict[int, int]) -> bool:
    ended.update(descendants.ended_children())
    return pid in ended


if __name__ == "__main__":
    main()
