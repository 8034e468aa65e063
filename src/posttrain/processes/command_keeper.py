"""The keeper of a server: it starts a command and ends it, with everything that the command has started, when standard input
closes, which is when the process that started the keeper has gone. Then it deletes the server's folder, too.

Started by ``lean_command("posttrain.processes.command_keeper", FOLDER, SHARED, COMMAND, ...)``. SHARED is the beginning of the
names of shared memory that the command may leave behind ("" for none): what it had mapped and no process uses is deleted. Its
exit code is the command's. Standard library only.
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

from posttrain.processes import descendants, proc

GRACE_S = 10.0  # from SIGTERM to SIGKILL


def main() -> None:
    folder, shared, *command = sys.argv[1:]
    descendants.adopt_orphans()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    alone = threading.Event()
    segments: set[str] = set()
    threading.Thread(target=_end_with_input, args=(child, alone, segments, shared), daemon=True).start()
    code = child.wait()
    if shared:
        segments |= proc.mapped_files(_below(), shared)
    descendants.kill_group(child.pid)
    descendants.kill_all_descendants()
    if segments:
        for segment in segments - proc.mapped_files(proc.all_processes(), shared):
            Path(segment).unlink(missing_ok=True)
    if alone.is_set():
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(code & 0xFF)


def _end_with_input(child: subprocess.Popen[bytes], alone: threading.Event, segments: set[str], shared: str) -> None:
    while os.read(0, 1024):
        pass
    alone.set()
    if shared:
        segments |= proc.mapped_files(_below(), shared)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    time.sleep(GRACE_S)
    descendants.kill_group(child.pid)


def _below() -> list[int]:
    return proc.descendants(os.getpid())
