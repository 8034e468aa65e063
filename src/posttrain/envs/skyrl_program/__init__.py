"""Programs on SkyRL that bring a generator of their own, in a Python that has SkyRL and what the program needs.

    bridge.py (that Python: the program's get_generator) ──HTTP on loopback──▶ the listener of agents ──▶ the run's sampler

The program's generator plays an episode as it does under SkyRL, with a client in the place of SkyRL's inference engines. Every
request of it is a turn of the episode, so the tokens that were sampled are those that are trained.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.data.episodes import FIRST_TRAINING_SEED
from posttrain.envs.agent import Agent
from posttrain.envs.agent.bridged import BridgedEpisode, named_python
from posttrain.envs.agent.episode import AgentEpisode
from posttrain.envs.agent.turn_requests import MODEL
from posttrain.interfaces.env import AskingEnv, EnvSpec
from posttrain.registry import ENVS

PYTHON = "POSTTRAIN_SKYRL_PYTHON"
BRIDGE = Path(__file__).with_name("bridge.py")
PROMPT = "program_prompt"  # of a row that the program has read itself: its prompt, where that is a text
# Of vLLM, which SkyRL adds to every request: they have no effect on a turn here, whose text has no special tokens
NO_EFFECT = ("min_tokens", "skip_special_tokens", "include_stop_str_in_output")


@ENVS.register("skyrl_program", asks=True)
def skyrl_program(
    spec: EnvSpec,
    *,
    file: str,
    folder: str,
    env_class: str | None = None,
    arguments: Sequence[str] = (),
    python: str | None = None,
    any_sampling: bool = True,
) -> AskingEnv:
    """An episode of a row that a program's own generator plays, with the reward that it returns.

    Args: file, the program; folder, from which it is imported: its checkout, where its modules import each other by full names;
        env_class, of rows that name none; arguments, the program's own, KEY=VALUE, of which it builds its configuration; python,
        the program that has SkyRL and what the generator imports, by default $POSTTRAIN_SKYRL_PYTHON; any_sampling, ignore
        temperature, top_p, top_k, min_p and seed of the generator's requests: the run determines the sampling.
    Raises: ConfigError without a python.
    """
    plays = {"file": file, "folder": folder, "env_class": env_class, "arguments": list(arguments)}
    return ProgramEpisode(spec, plays, os.path.expanduser(python_of(python)), any_sampling=any_sampling)


def python_of(named: str | None) -> str:
    """Return the Python that has SkyRL. Raises: ConfigError where none is named."""
    return named_python(named, PYTHON, "a program on SkyRL", "SkyRL")


def as_policy(body: Any) -> Any:
    """Return a request without the words of vLLM that have no effect here, under the policy's name: generators ask for the
    model by its path."""
    if not isinstance(body, dict):
        return body
    asked = {name: value for name, value in body.items() if name not in NO_EFFECT}
    # A number, in vLLM's own interface
    if "messages" in asked and asked.get("logprobs") is not None:
        asked["logprobs"] = asked["logprobs"] is not False
    return {**asked, "model": MODEL}


class ProgramEpisode(Agent):
    """An agent whose loop is the program's generator."""

    def __init__(self, spec: EnvSpec, plays: Mapping[str, Any], python: str, *, any_sampling: bool):
        super().__init__(spec, None, None, any_sampling=any_sampling, options={})
        self._plays, self._python = plays, python

    def reads(self, body: Any) -> Any:
        return as_policy(body)

    def started(self, episode: AgentEpisode) -> BridgedEpisode:
        row = dict(episode.row)
        return BridgedEpisode(
            self._python,
            BRIDGE,
            "SkyRL",
            {
                **self._plays,
                "messages": row.pop(PROMPT, None) or [dict(message) for message in episode.messages],
                "row": row,
                "seed": episode.seed,
                "training": episode.seed >= FIRST_TRAINING_SEED,
                "base_url": episode.base_url,
                "api_key": episode.api_key,
            },
        )
