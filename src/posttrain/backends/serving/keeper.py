"""Runs a command and ends it, with everything that it has started, when standard input closes: when whoever asked is gone. Then
FOLDER is deleted, too: nobody is left to read what lies there.

A script on its own: python keeper.py FOLDER COMMAND [ARGUMENT ...]
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

GRACE_S = 10.0  # from asking it to end to ending it
SHARED = "/dev/shm/psm_"  # shared memory of Python's multiprocessing, which vLLM 0.32 leaves behind, hundreds of MB at a time


def main() -> int:
    folder, *command = sys.argv[1:]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    alone = threading.Event()
    segments: set[str] = set()
    threading.Thread(target=_end_with_input, args=(child, alone, segments), daemon=True).start()
    code = child.wait()
    segments |= _segments(_of_session(child.pid))
    _signal(child.pid, signal.SIGKILL)  # what it has left behind
    if segments:
        _delete(segments, child.pid)
    if alone.is_set():
        shutil.rmtree(folder, ignore_errors=True)
    return code


def _end_with_input(child: subprocess.Popen[bytes], alone: threading.Event, segments: set[str]) -> None:
    while os.read(0, 1024):
        pass
    alone.set()
    segments |= _segments(_of_session(child.pid))
    _signal(child.pid, signal.SIGTERM)
    time.sleep(GRACE_S)
    _signal(child.pid, signal.SIGKILL)


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _of_session(session: int) -> list[int]:
    """Living processes of a session."""
    found = []
    for entry in _processes():
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] not in "ZX":
                found.append(int(entry.name))
    return found


def _segments(pids: list[int]) -> set[str]:
    """Shared memory that processes have mapped."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {line.split()[-1] for line in lines if line.split()[-1].startswith(SHARED)}
    return found


def _delete(segments: set[str], session: int) -> None:
    """Those that nobody uses, when the processes of the session are gone."""
    until = time.monotonic() + GRACE_S
    while _of_session(session) and time.monotonic() < until:
        time.sleep(0.05)
    used = _segments([int(entry.name) for entry in _processes()])
    for segment in segments - used:
        Path(segment).unlink(missing_ok=True)


def _processes() -> list[Path]:
    """None where there is no /proc."""
    with contextlib.suppress(OSError):
        return [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return []


if __name__ == "__main__":
    sys.exit(main())
