"""Environment managers written for ROLL, in a Python that has ROLL and what they need.

    bridge.py (that Python: the manager's run_rollout_loop) ──HTTP on loopback──▶ the listener of agents ──▶ the run's sampler

The manager plays an episode as it does under ROLL, with a proxy in the place of ROLL's policy. Every request of it is a turn of
the episode, so the tokens that were sampled are those that are trained.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.data.episodes import FIRST_TRAINING_SEED
from posttrain.envs.agent import Agent
from posttrain.envs.agent.bridged import BridgedEpisode, named_python
from posttrain.envs.agent.episode import AgentEpisode
from posttrain.envs.skyrl_program import as_policy
from posttrain.interfaces.env import AskingEnv, EnvSpec
from posttrain.registry import ENVS

PYTHON = "POSTTRAIN_ROLL_PYTHON"
BRIDGE = Path(__file__).with_name("bridge.py")


@ENVS.register("roll_manager", asks=True)
def roll_manager(
    spec: EnvSpec,
    *,
    folder: str,
    manager: str,
    tag: str,
    values: Mapping[str, Any],
    model: str,
    python: str | None = None,
) -> AskingEnv:
    """An episode that a manager of ROLL's form plays (``env_manager_cls``), with the score that its rollout holds.

    Args: folder, the checkout with the package roll; manager, its class, package.module.Class; tag, of custom_envs; values, the
        whole configuration, of which ROLL makes its AgenticConfig; model, whose tokenizer the manager gets; python, the program
        that has ROLL and what the manager imports, by default $POSTTRAIN_ROLL_PYTHON.
    Raises: ConfigError without a python.
    """
    plays = {"folder": folder, "manager": manager, "tag": tag, "values": dict(values), "model": model}
    found = named_python(python, PYTHON, "a manager of ROLL's", "ROLL")
    return ManagerEpisode(spec, plays, os.path.expanduser(found))


class ManagerEpisode(Agent):
    """An agent whose loop is the manager's."""

    def __init__(self, spec: EnvSpec, plays: Mapping[str, Any], python: str):
        super().__init__(spec, None, None, any_sampling=True, options={})
        self._plays, self._python = plays, python

    def reads(self, body: Any) -> Any:
        return as_policy(body)

    def started(self, episode: AgentEpisode) -> BridgedEpisode:
        asked = {
            **self._plays,
            "seed": episode.seed,
            "training": episode.seed >= FIRST_TRAINING_SEED,
            "base_url": episode.base_url,
            "api_key": episode.api_key,
        }
        return BridgedEpisode(self._python, BRIDGE, "ROLL", asked)
