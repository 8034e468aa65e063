"""The process that an agent runs in: it is started, watched until it ends, and killed with all that it has started."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any, Never

from posttrain.envs.agent.episode import AgentEpisode
from posttrain.envs.agent.listener import Listener
from posttrain.libraries.own_code import Calls, load
from posttrain.processes import descendants

LAST_WORDS_S = 1.0  # for what it has written to arrive, after it has ended
LAST_LINES = 20  # of what a program writes to standard error, kept to tell why it failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How an agent ended: with a result, or ``failure`` says what happened."""

    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None


class AgentProcess:
    """A process in a session of its own. ``output`` tells what is to be known of it; ``end_of`` makes of its last lines, and of
    the exit status, how it ended."""

    def __init__(self, pid: int, output: IO[str], end_of: Callable[[Sequence[str], int], Ended]):
        self._pid = pid
        self._output = output
        self._end_of = end_of
        self._status: int | None = None
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._threads: list[threading.Thread] = []

    def watch(self, tell: Callable[[Ended], None]) -> None:
        """``tell`` is called, once, by another thread."""

        def read() -> None:
            with suppress(ValueError):  # closed while it was read
                self._lines.extend(self._output)

        def look() -> None:
            _, status = os.waitpid(self._pid, 0)
            self._status = os.waitstatus_to_exitcode(status)
            reader.join(LAST_WORDS_S)
            tell(self._end_of(list(self._lines), self._status))

        reader = threading.Thread(target=read, name="agent-output", daemon=True)
        self._threads = [reader, threading.Thread(target=look, name="agent-watcher", daemon=True)]
        for thread in self._threads:
            thread.start()

    def kill(self) -> None:
        """Returns when it is gone, with all that it has started."""
        below = descendants.descendants(self._pid) if self._status is None else []
        descendants.kill_group(self._pid)
        descendants.kill(below)
        for thread in self._threads:
            thread.join()
        self._output.close()


def start_function(where: str, episode: AgentEpisode, options: Mapping[str, Any], listener: Listener) -> AgentProcess:
    """The function is loaded here, so that the next episode finds its libraries imported, and called in a fork of this process.

    Raises: ConfigError when there is none.
    """
    function = load(where)
    reading, writing = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.close(listener.fileno())
        _call(function, episode, options, writing, parent)
    os.close(writing)
    return AgentProcess(pid, os.fdopen(reading, encoding="utf-8"), _end_of_function)


def start_command(command: Sequence[str], episode: AgentEpisode) -> AgentProcess:
    """Raises: OSError when there is no such program."""
    started = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, **_addresses(episode)},
        start_new_session=True,
    )
    assert started.stderr is not None
    started.returncode = 0  # it is waited for here, and the object has nothing more to do
    return AgentProcess(started.pid, started.stderr, _end_of_command)


def with_result(process_end: Ended, result: Mapping[str, Any] | None) -> Ended:
    """A program's end with what it has given as its result."""
    return process_end if process_end.failure is not None or result is None else _ended(result)


def _addresses(episode: AgentEpisode) -> dict[str, str]:
    local = ",".join(
        filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1"))
    )  # the address is nobody's proxy's business
    return {
        "OPENAI_BASE_URL": episode.base_url,
        "OPENAI_API_KEY": episode.api_key,
        "POSTTRAIN_URL": episode.base_url.removesuffix("/v1"),
        "NO_PROXY": local,
        "no_proxy": local,
    }


def _call(
    function: Callable[..., Any], episode: AgentEpisode, options: Mapping[str, Any], writing: int, parent: int
) -> Never:
    """In the fork: call it, write what it returned as a line of JSON, and end."""
    try:
        os.setsid()
        descendants.die_with_parent(parent)
        os.environ.update(_addresses(episode))
        calls = Calls()
        try:
            told: dict[str, Any] = {"result": calls.call(function, episode, **options)}
            line = json.dumps(told)
        except BaseException as error:  # noqa: BLE001 - someone's code, which may also call sys.exit
            frames = traceback.extract_tb(error.__traceback__)
            line = json.dumps(
                {"failure": f"{type(error).__name__}: {error} ({frames[-1].filename}:{frames[-1].lineno})"}
            )
        with suppress(OSError), os.fdopen(writing, "w", encoding="utf-8") as pipe:
            pipe.write(line + "\n")
    finally:
        os._exit(0)


def _end_of_function(lines: Sequence[str], status: int) -> Ended:
    if status != 0 or not lines:
        return Ended(failure=f"its process ended: {_in_words(status)}")
    told = json.loads("".join(lines))
    return Ended(failure=told["failure"][:1000]) if "failure" in told else _ended(told["result"])


def _end_of_command(lines: Sequence[str], status: int) -> Ended:
    if status == 0:
        return Ended()
    return Ended(failure=f"{_in_words(status)}: {''.join(lines).strip()[-800:]}")


def _ended(result: Any) -> Ended:
    """A number, nothing, or a mapping with a reward and metrics."""
    if result is None or isinstance(result, Mapping):
        reward, metrics = (result or {}).get("reward"), (result or {}).get("metrics") or {}
    else:
        reward, metrics = result, {}
    if reward is not None and not _is_finite(reward):
        return Ended(failure=f"its reward is {reward!r:.80} instead of a finite number")
    bad = (
        metrics
        if not isinstance(metrics, Mapping)
        else [name for name, each in metrics.items() if not _is_finite(each)]
    )
    if bad:
        return Ended(failure=f"its metrics are no finite numbers by name: {bad!r:.80}")
    return Ended(
        reward=None if reward is None else float(reward), metrics={name: float(each) for name, each in metrics.items()}
    )


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _in_words(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    with suppress(ValueError):
        return f"signal {signal.Signals(-status).name}"
    return f"signal {-status}"
