"""The process that an agent runs in, and its result: a function is called in a fork of this process, a program is started."""

from __future__ import annotations

import json
import math
import os
import subprocess
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from posttrain.envs.agent.episode import AgentEpisode
from posttrain.envs.agent.listener import Listener
from posttrain.libraries.own_code import Calls, load
from posttrain.processes import start
from posttrain.processes.environment import Kind, variables_for
from posttrain.processes.session import SessionProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEnd:
    """The end of an agent: a result, or ``failure`` says what happened."""

    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None
    left_out: Sequence[
        Sequence[Sequence[int]]
    ] = ()  # (prompt, response), token ids, of turns that are not to be trained


class AgentRun(Protocol):
    """An agent at work."""

    def watch(self, on_end: Callable[[AgentEnd], None]) -> None:
        """``on_end`` is called once, by another thread."""
        ...

    def kill(self) -> None:
        """Returns when it is gone, with everything that it has started."""
        ...


class AgentProcess:
    """An agent's process. ``end_of`` makes its end of its last lines and its exit code."""

    def __init__(self, process: SessionProcess, end_of: Callable[[Sequence[str], int], AgentEnd]):
        self._process = process
        self._end_of = end_of

    def watch(self, on_end: Callable[[AgentEnd], None]) -> None:
        """``on_end`` is called once, by another thread."""
        self._process.watch(lambda lines, code: on_end(self._end_of(lines, code)))

    def kill(self) -> None:
        """Returns when it is gone, with everything that it has started."""
        self._process.kill()


def start_function(where: str, episode: AgentEpisode, options: Mapping[str, Any], listener: Listener) -> AgentProcess:
    """The function is loaded here, so that the next episode finds its libraries imported, and called in a fork of this process.

    Raises: ConfigError when there is none.
    """
    function = load(where)
    reading, writing = os.pipe()

    def work() -> None:
        os.close(reading)
        os.close(listener.fileno())
        _call(function, episode, options, writing)

    pid = start.fork(work)
    os.close(writing)
    return AgentProcess(SessionProcess(pid, os.fdopen(reading, encoding="utf-8")), _end_of_function)


def start_command(command: Sequence[str], episode: AgentEpisode) -> AgentProcess:
    """Raises: OSError when there is no such program."""
    started = start.start(command, environment=_environment(episode), stderr=subprocess.PIPE)
    assert started.stderr is not None
    started.returncode = 0  # its SessionProcess waits for it
    lines = os.fdopen(os.dup(started.stderr.fileno()), encoding="utf-8", errors="replace")
    started.stderr.close()
    return AgentProcess(SessionProcess(started.pid, lines), _end_of_command)


def with_result(process_end: AgentEnd, result: Mapping[str, Any] | None) -> AgentEnd:
    """A program's end with what it has given as its result."""
    return process_end if process_end.failure is not None or result is None else ended(result)


def _environment(episode: AgentEpisode) -> dict[str, str]:
    """The agent's environment variables: those of environments, and the address and token of its episode."""
    # Requests to the address do not go through a proxy.
    local = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1")))
    return {
        **variables_for(Kind.USER_CODE),
        "OPENAI_BASE_URL": episode.base_url,
        "OPENAI_API_KEY": episode.api_key,
        "POSTTRAIN_URL": episode.base_url.removesuffix("/v1"),
        "NO_PROXY": local,
        "no_proxy": local,
    }


def _call(function: Callable[..., Any], episode: AgentEpisode, options: Mapping[str, Any], writing: int) -> None:
    """Call it, in the fork, and write its return value as a line of JSON."""
    visible = _environment(episode)
    os.environ.clear()
    os.environ.update(visible)
    try:
        line = json.dumps({"result": Calls().call(function, episode, **options)})
    except BaseException as error:  # noqa: BLE001 - someone's code, which may also call sys.exit
        last = traceback.extract_tb(error.__traceback__)[-1]
        line = json.dumps({"failure": f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"})
    with suppress(OSError), os.fdopen(writing, "w", encoding="utf-8") as pipe:
        pipe.write(line + "\n")


def _end_of_function(lines: Sequence[str], code: int) -> AgentEnd:
    if code != 0 or not lines:
        return AgentEnd(failure=f"its process ended: {start.ended_in_words(code)}")
    told = json.loads("".join(lines))
    return AgentEnd(failure=told["failure"][:1000]) if "failure" in told else ended(told["result"])


def _end_of_command(lines: Sequence[str], code: int) -> AgentEnd:
    if code == 0:
        return AgentEnd()
    return AgentEnd(failure=f"{start.ended_in_words(code)}: {''.join(lines).strip()[-800:]}")


def ended(result: Any) -> AgentEnd:
    """A number, nothing, or a mapping with a reward and metrics."""
    if result is None or isinstance(result, Mapping):
        reward, metrics = (result or {}).get("reward"), (result or {}).get("metrics") or {}
    else:
        reward, metrics = result, {}
    if reward is not None and not _is_finite(reward):
        return AgentEnd(failure=f"its reward is {reward!r:.80} instead of a finite number")
    bad = (
        metrics
        if not isinstance(metrics, Mapping)
        else [name for name, each in metrics.items() if not _is_finite(each)]
    )
    if bad:
        return AgentEnd(failure=f"its metrics are no finite numbers by name: {bad!r:.80}")
    return AgentEnd(
        reward=None if reward is None else float(reward),
        metrics={name: float(each) for name, each in metrics.items()},
        left_out=result.get("left_out") or () if isinstance(result, Mapping) else (),
    )


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
