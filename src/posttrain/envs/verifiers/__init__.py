"""Environments of the package verifiers, which prime-rl trains on, in a Python of their own.

    bridge.py (its own Python: verifiers) ──HTTP on loopback──▶ the listener of agents ──▶ the run's sampler

The environment plays its rollout with an OpenAI client, as it does everywhere; every request is a turn of the episode, and its
rubric gives the reward. So single-turn, multi-turn, tool and stateful-tool environments need nothing of their own here, and
the tokens that were sampled are those that are trained.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.data.episodes import FIRST_TRAINING_SEED
from posttrain.envs.agent import Agent
from posttrain.envs.agent.bridged import BridgedEpisode
from posttrain.envs.agent.episode import AgentEpisode
from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.env import AskingEnv, EnvSpec
from posttrain.libraries.prime_rl import Sources, sources
from posttrain.registry import ENVS

PYTHON = "POSTTRAIN_VERIFIERS_PYTHON"
BRIDGE = Path(__file__).with_name("bridge.py")


@ENVS.register("verifiers", asks=True)
def verifiers(
    spec: EnvSpec,
    *,
    env: str | Mapping[str, Any],
    source: str | None = None,
    trained: str | None = None,
    python: str | None = None,
    options: Mapping[str, Any] | None = None,
    any_sampling: bool = True,
) -> AskingEnv:
    """A rollout of an environment of the package verifiers, and its reward by the environment's rubric.

    Rows are the environment's own: an episode of training (seeds from 1,000,000) takes the row of its dataset with the number
    seed - 1,000,000, one of validation that of its evaluation dataset with the number seed; both begin again at the end. A column
    ``row`` (or SkyRL's ``example_id``) names another number. A taskset (verifiers 0.4) has one dataset for both.

    Args: env, the id of an installed environment or taskset, a file or folder with one, a block {"taskset": {"id": …}, "agent":
        …} as verifiers 0.4 and prime-rl write it, or a file of prime-rl's (.toml) with a ``source``, the name of one of its
        sources (validation plays the evaluation source of that name, if there is one); trained, the seat that is trained, by
        default the first without a model of its own: the policy plays the others, too, untrained; python, the program that has
        verifiers (0.1.9 to 0.4) and that environment, by default $POSTTRAIN_VERIFIERS_PYTHON; options, keyword arguments of
        ``load_environment``, or settings of the taskset; any_sampling, ignore temperature, top_p, top_k, min_p and seed in the
        environment's requests: the run determines the sampling.
    Raises: ConfigError without a python, and for a file that holds no such source.
    """
    python = python or os.environ.get(PYTHON)
    if not python:
        what = "verifiers needs a Python of its own, and none is named"
        fix = f"python -m venv FOLDER, install verifiers in it, and set python: FOLDER/bin/python, or {PYTHON}"
        raise ConfigError(Problem(what, fix=fix, field="python"))
    found = sources(env, source, options or {})
    return VerifiersEpisode(spec, found, os.path.expanduser(python), trained, any_sampling=any_sampling)


class VerifiersEpisode(Agent):
    """An agent whose loop is the environment's."""

    def __init__(self, spec: EnvSpec, found: Sources, python: str, trained: str | None, *, any_sampling: bool):
        super().__init__(spec, None, None, any_sampling=any_sampling, options={})
        self._found = found
        self._python = python
        self._trained = trained

    def started(self, episode: AgentEpisode) -> BridgedEpisode:
        training = episode.seed >= FIRST_TRAINING_SEED
        own = episode.row.get("row", episode.row.get("example_id"))
        number = own if isinstance(own, int) else episode.seed - (FIRST_TRAINING_SEED if training else 0)
        played = self._found.training if training else self._found.validation
        return BridgedEpisode(
            self._python,
            BRIDGE,
            "verifiers",
            {
                "env": played.env,
                "options": dict(played.options),
                "trained": self._trained,
                "max_turns": episode.max_turns,
                "training": training,
                "number": number,
                "base_url": episode.base_url,
                "api_key": episode.api_key,
            },
        )
