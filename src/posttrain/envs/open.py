"""Conversations of programs outside the run: they ask an address of the run for their turns, and send their rewards to it."""

from __future__ import annotations

from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.env import Env, EnvSpec
from posttrain.registry import ENVS


@ENVS.register("open")
def outside(
    spec: EnvSpec,
    *,
    host: str = "127.0.0.1",
    port: int = 8001,
    token_file: str | None = None,
    any_sampling: bool = False,
    conversation_timeout_s: float = 300.0,
    group_timeout_s: float = 600.0,
    wait_s: float = 600.0,
    scored_by: str | None = None,
    compare_observations: bool = True,
    ends_after_s: float | None = None,
) -> Env:
    """Programs outside the run play its episodes: docs/open-run.md.

    Args: host and port to listen at (0: a free port); token_file, with the bearer token that clients must send (null: one is
        drawn and written to endpoint_token in the run folder); any_sampling ignores temperature, top_p, top_k, min_p and seed
        of requests; conversation_timeout_s, after which a conversation without request and reward has failed;
        group_timeout_s, after which the episodes that a begun group still lacks have failed; wait_s, for which a new
        conversation waits while the run trains or is full; scored_by, the environment in environment.named that scores
        conversations whose row names none (null: a call or reward.terms do); compare_observations, fail a conversation that an
        environment is played again for, where it says something else than the policy read; ends_after_s, after which a
        conversation without a request has ended without a call (null: it fails after conversation_timeout_s).
    Raises: ConfigError, always: the run itself hosts these episodes.
    """
    what = "the environment open is played by programs outside, for a whole run of posttrain train"
    raise ConfigError(Problem(what, fix="name it in environment.name", field="environment.name"))
