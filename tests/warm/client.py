"""Asks the server of warm processes for one: as a part of the tests (``WarmProcess``), or in Ray's place (``ray_worker.py``).

Imports little: in Ray's place it runs once for each worker.
"""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

SOCKET = "POSTTRAIN_TESTS_WARM"  # the variable that says where the server listens; not set: there is none
WARM_CHILDREN = "POSTTRAIN_TESTS_WARM_CHILDREN"  # the variable of a process whose sys.executable is STAND_IN
STAND_IN = "python"  # file beside the socket, which stands in for Python
CHILDREN = "children"  # folder beside the socket: a file per process in Ray's place, whose text is the process that it stands for


def ask(
    path: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    files: Sequence[int] = (0, 1, 2),
    *,
    folder: str | None = None,
    numbers: Sequence[int] = (0, 1, 2),
    imports: Sequence[str] = (),
) -> tuple[socket.socket, int]:
    """Have a process forked, in a session of its own. Returns: the connection, on which its end is told (``end_of``), and its id.

    Args: arguments are what follows ``python`` on a command line; numbers, which the files have in the process; imports, what the
        server is to import before, for this process and those after it.
    Raises: OSError when there is no server; RuntimeError when it has failed.
    """
    request = {
        "arguments": list(arguments),
        "environment": dict(environment),
        "folder": folder or os.getcwd(),
        "numbers": list(numbers),
        "imports": list(imports),
    }
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    text = json.dumps(request).encode() + b"\n"
    sent = connection.sendmsg([text], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
    connection.sendall(text[sent:])
    answer = _line(connection)
    if answer is None:
        raise RuntimeError("the server of warm processes has ended; what it said is above")
    return connection, int(answer["pid"])


def end_of(connection: socket.socket) -> int:
    """Wait for the end of a process. Returns: its exit code; minus the number of the signal that ended it."""
    answer = _line(connection)
    connection.close()
    return int(answer["ended"]) if answer else -9  # the server kills what it leaves


def _line(connection: socket.socket) -> dict[str, Any] | None:
    text = b""
    while not text.endswith(b"\n"):
        part = connection.recv(1)
        if not part:
            return None
        text += part
    found: dict[str, Any] = json.loads(text)
    return found
