"""Group-in-group policy optimisation: trajectories are compared with each other, and so are steps from the same state."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from posttrain.algos.advantages.grpo import standardized
from posttrain.algos.groups import centered, compare_in_groups
from posttrain.algos.reward_normalization import RunningMoments, normalize_rewards
from posttrain.algos.steps import discounted_on_tokens, last_steps, step_returns
from posttrain.registry import ADVANTAGES
from posttrain.settings import Positive, Share


@ADVANTAGES.register("gigpo", compares_responses=True)
def gigpo(
    episode_rewards: Tensor,
    step_rewards: Tensor,
    valid: Tensor,
    group_index: Tensor,
    trajectory_index: Tensor,
    step_index: Tensor,
    state_index: Tensor,
    response_mask: Tensor,
    turn_penalties: Tensor,
    *,
    step_gamma: Share = 0.95,
    episode_weight: float = 1.0,
    step_weight: float = 1.0,
    normalize_by_std: bool = True,
    episode_mean: Literal["group", "batch", "none"] = "group",
    episode_std: Literal["group", "batch", "none"] | None = None,
    compare_steps: bool = True,
    episodes_by_step: bool = False,
    total_clip: Positive | None = None,
    token_gamma: Share = 1.0,
) -> Tensor:
    """A = episode_weight x A_episode + step_weight x A_step, on every token of the step's response.

    A_episode compares a trajectory's reward with those of the other trajectories of its group, each counted once. A_step
    compares the step's discounted return with those of the steps of the group that began in the same state. Both are
    (x - mean) / (sample standard deviation + 1e-6); what stands alone, or among equals, gets exactly 0. (ROLL lets long
    trajectories count once per step in the first, and compares equal states of different groups in the second.)

    Args: a row is a step. episode_rewards [B], of the row's whole trajectory; step_rewards [B]; valid [B] bool (other steps
        get 0 and are in no comparison); group_index [B] int64, equal for trajectories from the same start; trajectory_index
        and step_index [B] int64, which trajectory and where in it; state_index [B] int64, equal for equal states, such as a
        hash of the observation; response_mask [B, T] bool; turn_penalties [B], taken from the return of the step itself and
        not from those of earlier ones.
    Settings:
        step_gamma: discount per step of the environment.
        episode_weight: weight of the comparison of whole trajectories.
        step_weight: weight of the comparison of steps from the same state.
        normalize_by_std: divide by the group's standard deviation; false does not.
        episode_mean: compare a trajectory's reward with the mean of its group, as in the paper, of all trajectories of the
            batch, or with none.
        episode_std: divide that by the standard deviation of the group, of the batch, or by none; null goes by
            normalize_by_std.
        compare_steps: compare returns of steps; false takes them as they are.
        episodes_by_step: compare the episode_rewards of all steps, so that a long trajectory counts once per step, and penalties
            of single steps count; a group of one step keeps its reward. episode_mean and episode_std are not read then.
        total_clip: the weighted sum is cut to plus or minus this; null does not cut.
        token_gamma: discount per token of a step's response, backwards from its last.
    Returns: [B, T] float32, 0 where response_mask is False.
    Source: arXiv:2505.10978, equations 6 to 9; episodes_by_step and turn_penalties as in the authors' own code.
    """

    def compare(scores: Tensor, rows: Tensor) -> Tensor:
        return standardized(scores) if normalize_by_std else centered(scores)

    last = last_steps(valid, trajectory_index, step_index)
    is_last = valid & (last == torch.arange(len(valid), device=valid.device))
    if episodes_by_step:
        episodes = compare_in_groups(episode_rewards, valid, group_index, compare, lone_sample_keeps_reward=True)
        last = torch.arange(len(valid), device=valid.device)
    elif episode_mean == "group" and episode_std is None:
        episodes = compare_in_groups(episode_rewards, is_last, group_index, compare, lone_sample_keeps_reward=False)
    else:
        std = episode_std or ("group" if normalize_by_std else "none")
        rewards = episode_rewards.double()
        episodes = normalize_rewards(rewards, is_last, group_index, RunningMoments(), mean=episode_mean, std=std)
    returns = step_returns(step_rewards, valid, trajectory_index, step_index, step_gamma) - turn_penalties
    places = torch.stack([group_index, state_index], dim=1)
    same_state = places.unique(dim=0, return_inverse=True)[1]
    steps = returns
    if compare_steps:
        steps = compare_in_groups(returns, valid, same_state, compare, lone_sample_keeps_reward=False)
    total = torch.where(valid, episode_weight * episodes[last] + step_weight * steps, 0.0)
    if total_clip is not None:
        total = total.clamp(-total_clip, total_clip)
    return discounted_on_tokens(total, response_mask, token_gamma)
