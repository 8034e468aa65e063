"""A game of two seats in the form of verifiers 0.4, whose rewards add up to nothing. It never ends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["RivalsEnv", "RivalsTaskset"]


class RivalsTaskset(vf.Taskset[vf.Task, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[vf.Task]:
        for place in itertools.count():
            yield vf.Task(vf.TaskData(idx=place, prompt=None))


class RivalsConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    second: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})


class RivalsEnv(vf.Env[RivalsConfig]):
    async def run(self, task, agents):
        # The same words to both: only the seat tells their conversations apart.
        here = vf.Task(vf.TaskData(idx=task.data.idx, prompt=None))
        async with agents.first.interaction(here) as first, agents.second.interaction(here) as second:
            for round_ in range(2):
                for talk in (first, second):
                    if (await talk.turn(f"Round {round_}.")).terminated:
                        break
        for talk, reward in ((first, 1.0), (second, -1.0)):
            talk.trace.record_reward("won", reward)
