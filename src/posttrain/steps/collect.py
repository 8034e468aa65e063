"""Sample responses."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.errors import RunStopped
from posttrain.interfaces.roles import Roles
from posttrain.interfaces.rollout_engine import OnGroup, OnTokens
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, TrajectoryGroup
from posttrain.steps.play import play


def collect(
    roles: Roles,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    on_tokens: OnTokens | None = None,
    on_group: OnGroup | None = None,
) -> list[TrajectoryGroup]:
    """A group of responses per prompt, all sampled by the current policy; where the run has environments, each of them an
    episode.

    Raises: RunStopped when the sampler serves other weights than the trainer holds.
    """
    served, held = roles.rollout.version, roles.policy.version
    if served != held:
        raise RunStopped(f"the sampler serves version {served} of the weights, the trainer holds version {held}")
    if roles.worlds:
        return play(roles.rollout, prompts, sampling, roles.worlds, on_tokens, on_group)
    return roles.rollout.generate(prompts, sampling, on_tokens, on_group)
