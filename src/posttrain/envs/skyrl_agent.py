"""Agents of skyrl-agent (ReAct, OpenHands' CodeAct and others with their tools), in a Python that has that package of SkyRL's.

The runner that a task's file describes plays an episode as it does in the place of verl's own manager, and returns its reward.
Every request of the runner is a turn of the episode, so the tokens that were sampled are those that are trained.
"""

from __future__ import annotations

import os
from pathlib import Path

from posttrain.data.episodes import FIRST_TRAINING_SEED
from posttrain.envs.agent.bridged import BridgedEpisode
from posttrain.envs.agent.episode import AgentEpisode
from posttrain.envs.skyrl_program import BRIDGE, ProgramEpisode, python_of
from posttrain.envs.verl_columns import columns_of
from posttrain.interfaces.env import AskingEnv, EnvSpec
from posttrain.registry import ENVS


@ENVS.register("skyrl_agent", asks=True)
def skyrl_agent(
    spec: EnvSpec, *, task: str, folder: str, model: str, python: str | None = None, any_sampling: bool = True
) -> AskingEnv:
    """An episode of a row that skyrl-agent's runner plays, with the reward that it returns.

    Args: task, the file that describes it (agent_cls, task, tools, generator), from the current folder or else from ``folder``,
        which holds the package skyrl_agent; model, whose tokenizer the runner uses; python, the program that has what it
        imports, by default $POSTTRAIN_SKYRL_PYTHON; any_sampling, ignore temperature, top_p, top_k, min_p and seed of its
        requests: the run determines the sampling.
    Raises: ConfigError without a python.
    """
    plays = {"task": str(task_file(task, folder)), "folder": folder, "model": model}
    return TaskEpisode(spec, plays, os.path.expanduser(python_of(python)), any_sampling=any_sampling)


def task_file(task: str, folder: str) -> Path:
    """Return the path of a task's file."""
    path = Path(task).expanduser()
    return path if path.is_file() or path.is_absolute() else Path(folder).expanduser() / path


class TaskEpisode(ProgramEpisode):
    """An agent whose loop is a runner of skyrl-agent's."""

    def started(self, episode: AgentEpisode) -> BridgedEpisode:
        return BridgedEpisode(
            self._python,
            BRIDGE,
            "SkyRL",
            {
                **self._plays,
                "columns": columns_of(episode.row, episode.messages),
                "seed": episode.seed,
                "training": episode.seed >= FIRST_TRAINING_SEED,
                "base_url": episode.base_url,
                "api_key": episode.api_key,
            },
        )
