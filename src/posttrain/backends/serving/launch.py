"""Starting a server on this machine, and ending it with us."""

from __future__ import annotations

import re
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from posttrain.errors import RunStopped
from posttrain.processes import start
from posttrain.processes.environment import Kind, variables_for

# Shared memory of Python's multiprocessing, which vLLM 0.32 leaves behind, hundreds of MB at a time.
_SHARED_MEMORY = "/dev/shm/psm_"
_END_S = 20.0  # for the keeper to end the server
_LAST_LINES, _FIRST_ERRORS = 10, 5
_NAMES_AN_ERROR = re.compile(r"\b\w*(Error|Exception): ")


class LaunchedServer:
    """A server process on this machine. It ends with this object, and with this process, however that ends."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        port: int,
        name: str,
        environment: Mapping[str, str],
        importable: Path | None = None,
        host: str = "127.0.0.1",
    ):
        """Args: environment, variables besides those of ``Kind.SERVER``; importable, a package's folder: the server can import
        that package, and nothing that stands beside it; host, the address that it listens at."""
        self.name = name
        self.address = f"{host}:{port}"
        self.url = f"http://{self.address}"
        self.folder = tempfile.TemporaryDirectory(prefix="posttrain-server-")
        self.log = Path(self.folder.name) / "log.txt"
        environment = dict(environment)
        if importable:
            code = Path(self.folder.name) / "code"
            code.mkdir()
            (code / importable.name).symlink_to(importable)
            environment["PYTHONPATH"] = str(code)
        with self.log.open("wb") as log:
            self.process = start.start(
                start.lean_command("posttrain.processes.command_keeper", self.folder.name, _SHARED_MEMORY, *command),
                environment={**variables_for(Kind.SERVER), **environment},
                stdin=subprocess.PIPE,  # the keeper ends the server when this pipe closes
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder.name,
            )
        self._end = weakref.finalize(self, _end, self.process, self.folder)

    def wait_until_ready(self, path: str, timeout_s: float) -> None:
        """Raises: RunStopped, with the last lines of its log, when it ends or does not answer in time."""
        end = time.monotonic() + timeout_s
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RunStopped(f"{self.name} did not start:\n{self.last_lines()}")
            try:
                with opener.open(self.url + path, timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        self.close()
        raise RunStopped(f"{self.name} did not answer within {timeout_s:g} s; the end of its log:\n{self.last_lines()}")

    def last_lines(self) -> str:
        """The lines of its log that name an error, the first ones, and its last lines."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return "  (no log)"
        named = [line for line in lines[:-_LAST_LINES] if _NAMES_AN_ERROR.search(line)]
        return "\n".join(f"  {line[:300]}" for line in [*named[:_FIRST_ERRORS], *lines[-_LAST_LINES:]])

    def close(self) -> None:
        self._end()


class Follower:
    """The processes of a server on a further machine: they serve no requests of their own."""

    def __init__(self, server: LaunchedServer):
        self.server = server

    def close(self) -> None:
        self.server.close()


def free_port() -> int:
    """Find a port of loopback that is unused at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def arguments(options: Mapping[str, object], *, off: str | None) -> list[str]:
    """Options as a command line: ``max_model_len: 256`` becomes ``--max-model-len 256``.

    True is the flag alone, null leaves the option out, a mapping is written as JSON. False is the flag with ``off`` before it
    ("no-"), or left out where the server knows no such form (None).
    """
    import json

    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if value is None or (value is False and off is None):
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--{off}{flag}")
        elif isinstance(value, Mapping):
            words += [f"--{flag}", json.dumps(value)]
        elif isinstance(value, list | tuple):
            words += [f"--{flag}", *map(str, value)]
        else:
            words += [f"--{flag}", str(value)]
    return words


def _end(process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]) -> None:
    if process.stdin:
        process.stdin.close()
    start.end(process, _END_S)
    folder.cleanup()
