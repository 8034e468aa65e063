"""Runs a command and ends it, with everything that it has started, when standard input closes: when whoever asked is gone.

A script on its own: python keeper.py COMMAND [ARGUMENT ...]
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

GRACE_S = 10.0  # from asking it to end to ending it


def main() -> int:
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_end_with_input, args=(child,), daemon=True).start()
    code = child.wait()
    _signal(child.pid, signal.SIGKILL)  # what it has left behind
    return code


def _end_with_input(child: subprocess.Popen[bytes]) -> None:
    while os.read(0, 1024):
        pass
    _signal(child.pid, signal.SIGTERM)
    time.sleep(GRACE_S)
    _signal(child.pid, signal.SIGKILL)


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main())
