"""A sampler's worker whose sampling is done by a server beside it: the worker does not outlive its server."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from posttrain.backends.serving.launch import LaunchedServer
from posttrain.processes.proc import descendants, is_stopped

LOOK_EVERY_S = 1.0
DOUBT_S = 3.0  # after a failure, in which its server may turn out to have ended


class Server:
    """Watches the server that a sampler has started. When that ends, or one of its processes is stopped, this process ends, too:
    the driver sees it at once, and starts another worker with another server."""

    def __init__(self, server: LaunchedServer):
        self._server = server
        threading.Thread(target=self._watch, name="server", daemon=True).start()

    def doubt(self) -> None:
        """Look for the server's end after a failure; does not return when it has ended."""
        until = time.monotonic() + DOUBT_S
        while time.monotonic() < until:
            self._look()
            time.sleep(0.1)

    def _watch(self) -> None:
        while True:
            self._look()
            time.sleep(LOOK_EVERY_S)

    def _look(self) -> None:
        if why := trouble_of(self._server):
            words = f"{self._server.name} {why}; the end of its log:\n{self._server.last_lines()}"
            print(words, file=sys.stderr, flush=True)
            self._server.folder.cleanup()
            os._exit(1)  # the keeper ends what is left of the server


def server_of(sampler: Any) -> Server | None:
    """Watch the server that a sampler has started; None when it samples in this process."""
    launched: LaunchedServer | None = getattr(sampler, "server", None)
    return None if launched is None else Server(launched)


def trouble_of(server: LaunchedServer) -> str:
    """Describe the fault of a server's processes; empty when there is none."""
    code = server.process.poll()
    if code is not None:
        return f"has ended with code {code}"
    for pid in descendants(server.process.pid):
        if is_stopped(pid):
            return f"is stopped (process {pid}): it got SIGSTOP, or a debugger holds it"
    return ""
