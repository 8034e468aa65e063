"""Tasksets of verifiers 0.4 and newer (``verifiers.v1``), for bridge.py: run by a Python that has that package.

    environment (taskset, a harness for every seat) ──▶ the package's interception server ──▶ the listener of agents

The harness of a seat is a program of its own; the package relays its requests with our address and key.
"""

from __future__ import annotations

import copy
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

KEY = "POSTTRAIN_EPISODE_API_KEY"  # verifiers shows programs no variable with API_KEY in its name
POLICY, OTHER = (
    "policy",
    "policy-untrained",
)  # names of the model for the trained seat, and for the policy on other seats
# The package keeps a client for every address that it has seen, and every episode has one of its own.
EPISODES_PER_SERVING = 50


def block_of(env: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the block of an environment as verifiers and prime-rl write it: {"taskset": {"id": …}, SEAT: {…}, …}.

    Args: env, such a block, or the id, file or folder of a taskset; options, settings of the taskset.
    """
    block = copy.deepcopy(env) if isinstance(env, dict) else {"taskset": {"id": env}}
    taskset = {**(block.get("taskset") or {}), **options}
    if isinstance(taskset.get("id"), str):
        taskset["id"] = found_name(taskset["id"])
    return {**block, "taskset": taskset}


def found_name(taskset: str) -> str:
    """Return the id of a taskset. A file or folder becomes one that can be imported, also by tool servers."""
    path = Path(taskset).expanduser()
    if path.suffix != ".py" and not path.is_dir():
        return taskset
    name = path.stem.replace("-", "_")
    inner = path.is_dir() and (path / name).is_dir()  # a project whose package bears its name
    folder = str((path if inner else path.parent).resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    return name


class Taskset:
    """An environment of verifiers.v1, loaded once, and its tasks in order."""

    def __init__(self, env: Any, options: dict[str, Any], trained: str | None, max_turns: int | None):
        from verifiers.v1.utils.loaders import env_config_type, load_environment, resolve_env_config

        block = block_of(env, options)
        if not isinstance(env, dict):  # no seat is configured: each chats, on this machine
            kind = env_config_type(block["taskset"].get("id", ""), block.get("id", ""))
            for seat, given in _seats(kind()).items():
                harness = None if given.harness is None else given.harness.model_dump()
                block[seat] = {"harness": harness or {"id": "null"}, "runtime": {"type": "subprocess"}}
        config = resolve_env_config(block)
        seats = _seats(config)
        free = [name for name, seat in seats.items() if seat.model is None and seat.client is None]
        if trained is not None and trained not in free:
            raise ValueError(f"trained is {trained!r}; the seats without a model of their own are {', '.join(free)}")
        if not free:
            raise ValueError(f"every seat ({', '.join(seats)}) has a model of its own, so the policy plays none")
        self.trained = trained or free[0]
        mended = {name: seats[name].model_copy(update={"model": OTHER}) for name in free if name != self.trained}
        seat = seats[self.trained]
        if max_turns is not None and (seat.max_turns is None or seat.max_turns > max_turns):
            # So that the package ends the episode there, and scores it
            mended[self.trained] = seat.model_copy(update={"max_turns": max_turns})
        self.config = config.model_copy(update=mended)
        self.env = load_environment(self.config)
        self._tasks: list[Any] = []
        self._more: Iterator[Any] = iter(self.env.taskset)
        self._stack: AsyncExitStack | None = None
        self._served = 0

    async def play(self, episode: dict[str, Any]) -> dict[str, Any]:
        """Play a task. Returns: as bridge.py answers."""
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import EvalClientConfig

        task = self._task(episode["number"])
        await self._serve()
        os.environ[KEY] = episode["api_key"]
        client = EvalClientConfig(base_url=episode["base_url"], api_key_var=KEY)
        found = await self.env.run_episode(task, ModelContext(model=POLICY, client=client))
        traces = [trace for trace in found.traces if trace.agent.name in (self.trained, "", None)]
        errors = [*found.errors, *(error for trace in found.traces for error in trace.errors)]
        if not found.ok or not traces:
            why = f"{errors[0].type}: {errors[0].message}" if errors else f"nothing was played on {self.trained}"
            return {"failure": why[:1000]}
        metrics: dict[str, list[float]] = {}
        for trace in traces:
            scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
            for name, value in {**scores, **trace.metrics}.items():
                if isinstance(value, (int, float)) and math.isfinite(value):
                    metrics.setdefault(name, []).append(float(value))
        return {
            "reward": _mean([trace.reward for trace in traces]),
            "metrics": {name: _mean(values) for name, values in metrics.items()},
            "stop": str(traces[0].stop_condition or ""),
            "row": task.data.idx,
        }

    def _task(self, number: int) -> Any:
        """Return a task; those of a taskset that ends begin again at its end."""
        while len(self._tasks) <= number:
            task = next(self._more, None)
            if task is None:
                if not self._tasks:
                    raise ValueError("the taskset has no task")
                return self._tasks[number % len(self._tasks)]
            self._tasks.append(task)
        return self._tasks[number]

    async def _serve(self) -> None:
        """Start what the episodes share: tool servers, and the server that relays requests."""
        if self._stack is not None and self._served >= EPISODES_PER_SERVING:
            await self.close()
        if self._stack is None:
            self._stack, self._served = AsyncExitStack(), 0
            await self._stack.enter_async_context(self.env.serving())
        self._served += 1

    async def close(self) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            await stack.aclose()


def _seats(config: Any) -> dict[str, Any]:
    from verifiers.v1.configs.agent import agent_config_fields

    found: dict[str, Any] = agent_config_fields(config)
    return found


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


_loaded: dict[str, Taskset] = {}


async def play(episode: dict[str, Any]) -> dict[str, Any]:
    """Play an episode of bridge.py, whose environments are loaded once."""
    given = [episode[name] for name in ("env", "options", "trained", "max_turns")]
    key = json.dumps(given, sort_keys=True)
    if key not in _loaded:
        _loaded[key] = Taskset(*given)
    return await _loaded[key].play(episode)


async def close() -> None:
    for each in _loaded.values():
        await each.close()
