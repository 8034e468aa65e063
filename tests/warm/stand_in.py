"""``python stand_in.py SOCKET ARGUMENTS``: a warm process in the place of ``python ARGUMENTS``. It ends as that does, and hands
on the signals that it gets. The program that starts it is ``warm_python()``."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from warm.client import ask, end_of

RAYS_WORKER = "ray/_private/workers/setup_worker.py"


def open_files() -> list[int]:
    """The numbers of the files that were handed to this process, standard input, output and errors first."""
    with os.scandir("/proc/self/fd") as listing:
        numbers = sorted(int(entry.name) for entry in listing)
    return [
        number
        for number in numbers
        if number < 3 or (Path(f"/proc/self/fd/{number}").exists() and os.get_inheritable(number))
    ]


def main(path: str, *arguments: str) -> int:
    first, real = arguments[0] if arguments else "-", sys.executable
    if first.endswith(RAYS_WORKER):
        os.execv(real, [real, str(Path(__file__).with_name("ray_worker.py")), *arguments[1:]])
    # Other options and modules of others, such as pip: as they are
    if (first.startswith("-") and first not in ("-c", "-m")) or (
        first == "-m" and not arguments[1].startswith("posttrain")
    ):
        os.execv(real, [real, *arguments])
    files = open_files()
    connection, pid = ask(path, arguments, os.environ, files, numbers=files)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda sent, frame: _send(pid, sent))
    code = end_of(connection)
    if code < 0:  # by a signal, as this does then
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
