"""Environments of a fork of verl whose trainer plays episodes with an environment manager, which steps several copies at once.

    make_envs(config) -> (training manager, validation manager)
    manager.reset(kwargs) -> ({"text": [...], "image": ..., "anchor": ...}, infos)
    manager.step([action, ...]) -> (the same, rewards, dones, infos)

The fork's own function makes them, for one group: a manager with as many copies of one start as the group has episodes. Every
turn is a prompt of its own, the text of its copy. The checkout is imported in the process that plays the group, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.envs.env_manager.group import ManagedGroup
from posttrain.envs.env_manager.managers import made_by
from posttrain.interfaces.env import Env, EnvSpec
from posttrain.registry import ENVS


@ENVS.register("env_manager", in_groups=True, loads="posttrain.envs.env_manager.managers:load")
def env_manager(
    spec: EnvSpec,
    *,
    file: str,
    folder: str,
    function: str = "make_envs",
    config: Mapping[str, Any] | None = None,
    invalid_action_penalty: float = 0.0,
    validates: bool = False,
    copies: int = 1,
    seat: int = 0,
) -> Env:
    """All episodes of a group, played by the environment manager of a checkout.

    Args: file, with the function; folder, the checkout, from which its modules import each other; function, makes the managers of
        training and validation from a configuration; config, the fork's, of which data.train_batch_size, data.val_batch_size,
        env.rollout.n and env.seed are set for one group; invalid_action_penalty, taken from a turn whose action the manager calls
        invalid; validates, play the manager of validation; copies and seat, the episodes of the group and its number among those
        that are played together, are the host's.
    """
    made = made_by(file=file, folder=folder, function=function, config=config, validates=validates)
    return ManagedGroup(spec, made, copies=copies, seat=seat, penalty=invalid_action_penalty)
