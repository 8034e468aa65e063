"""Episodes in a Python of the user's own, started once and used for many: a program of this package, the bridge, reads an episode
from each line of its standard input, and answers with a line."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from posttrain.envs.agent.process import AgentEnd, ended
from posttrain.errors import ConfigError, Problem
from posttrain.processes import start
from posttrain.processes.environment import Kind, variables_for

LAST_LINES = 20  # of its standard error, kept to say why it failed


def named_python(named: str | None, variable: str, what: str, library: str) -> str:
    """Return the Python of a bridge, named in the settings or by an environment variable. Raises: ConfigError without one, for
    ``what`` needs it."""
    python = named or os.environ.get(variable)
    if not python:
        problem = f"{what} needs a Python that has {library}, and none is named"
        raise ConfigError(Problem(problem, fix=f"set python: FOLDER/bin/python, or {variable}", field="python"))
    return python


class Bridge:
    """A running bridge. One episode at a time.

    Args: python, the program; script, the bridge that it runs; title, whose Python it is, for messages.
    Raises: ConfigError when it cannot be started.
    """

    def __init__(self, python: str, script: Path, title: str):
        self.started_as = (python, script)
        self._title = title
        variables = {
            name: value for name, value in variables_for(Kind.USER_CODE).items() if not name.startswith("PYTHON")
        }
        local = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1")))
        try:
            self._process = start.start(
                [python, "-X", "utf8", str(script)],
                environment={**variables, "NO_PROXY": local, "no_proxy": local},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            what = f"the Python of {title} cannot be started: {error}"
            raise ConfigError(Problem(what, fix=f"name one with {title} installed", field="python")) from None
        self._errors: deque[str] = deque(maxlen=LAST_LINES)
        self._reader = threading.Thread(target=self._read_errors, name="bridge-errors", daemon=True)
        self._reader.start()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, episode: Mapping[str, Any]) -> dict[str, Any]:
        """Play an episode. Returns: its answer, {"failure": why} where the process has ended."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        line = b""
        with suppress(OSError, ValueError):
            stdin.write(json.dumps(dict(episode)).encode() + b"\n")
            line = stdout.readline()
        with suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict):
                return answer
        self.kill()
        self._reader.join(1.0)
        code = start.ended_in_words(self._process.returncode)
        return {"failure": f"the process of {self._title} has ended ({code}): {''.join(self._errors).strip()[-800:]}"}

    def kill(self) -> None:
        """End it at once, with everything that it has started."""
        start.end_tree(self._process)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in iter(self._process.stderr.readline, b""):
            self._errors.append(line.decode("utf-8", "replace"))


_running: list[Bridge] = []  # of this process, which holds one episode at a time; at most one


def bridge_of(python: str, script: Path, title: str) -> Bridge:
    """Return the bridge of this process, started where there is none of this Python. Raises: ConfigError."""
    while _running and not (_running[0].alive and _running[0].started_as == (python, script)):
        _running.pop().kill()
    if not _running:
        _running.append(Bridge(python, script, title))
    return _running[0]


class BridgedEpisode:
    """An episode in a bridge, as the process of an agent."""

    def __init__(self, python: str, script: Path, title: str, episode: Mapping[str, Any]):
        self._bridge = bridge_of(python, script, title)
        self._episode = episode
        self._over = False
        self._thread = threading.Thread(name="bridged-episode", daemon=True)

    def watch(self, on_end: Callable[[AgentEnd], None]) -> None:
        """``on_end`` is called once, by another thread."""

        def play() -> None:
            answer = self._bridge.ask(self._episode)
            self._over = True
            on_end(AgentEnd(failure=answer["failure"]) if "failure" in answer else ended(answer))

        self._thread = threading.Thread(target=play, name="bridged-episode", daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """End an episode that is under way, by ending its process; a finished one leaves it to the next."""
        if not self._over:
            self._bridge.kill()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
