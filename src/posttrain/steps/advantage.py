"""From rewards to what each token is worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from posttrain.algos.statistics import whiten
from posttrain.errors import Problem, RequestError
from posttrain.records.batches import SequenceBatch, TrainBatch
from posttrain.records.plans import AdvantagePlan
from posttrain.registry import ADVANTAGES
from posttrain.steps.joined import Joined, joined


def estimate_advantages(batch: SequenceBatch, plan: AdvantagePlan) -> TrainBatch:
    """A_{i,t} by the chosen estimator, whitened and clipped when asked for. Responses without a valid reward are left out of
    the loss.

    An estimator names what it needs by its positional parameters, among the names below. It sees trajectories, each as one row
    of sampled tokens (steps.joined); one that asks for trajectory_index sees rows, which are steps. Tokens that rollout
    correction has rejected are none that the policy sampled, for it as for the loss.

    Raises: RequestError when it needs something that no role has supplied.
    """
    available = {
        "rewards": batch.rewards,
        "token_rewards": _whitened_rewards(batch) if plan.whiten_rewards else _kept_rewards(batch),
        "reward_terms": batch.reward_terms,
        "greedy_rewards": batch.greedy_rewards,
        "valid": batch.valid,
        "group_index": batch.group_index,
        "response_mask": batch.kept_mask,
        "turn_begins": batch.response_mask & ~pad(batch.response_mask, (1, 0))[:, :-1],
        "old_logprobs": batch.old_logprobs,
        "sum_pi_squared": batch.sum_pi_squared,
        "values": batch.values,
        "episode_rewards": batch.rewards,
        "step_rewards": batch.step_rewards,
        "trajectory_index": batch.trajectories,
        "step_index": batch.step_index,
        "state_index": batch.state_index,
    }
    estimator, needed = ADVANTAGES.get(plan.name, plan.path), inputs_of(plan)
    missing = [name for name in needed if available.get(name) is None]
    if missing:
        raise RequestError(
            Problem(
                f"the advantage estimator {plan.name} needs {' and '.join(missing)}, and this run has no role that "
                f"computes {'them' if len(missing) > 1 else 'it'}",
                fix="choose another estimator, such as advantage.name=grpo",
                field="advantage.name",
            )
        )
    values = [available[name] for name in needed]
    if "trajectory_index" in needed:
        result = estimator(*values, **plan.parameters)
        advantages, returns = result if isinstance(result, tuple) else (result, None)
    else:
        whole = joined(batch)
        result = estimator(*(_joined(whole, value) for value in values), **plan.parameters)
        parts = result if isinstance(result, tuple) else (result, None)
        advantages, returns = whole.split(parts[0]), None if parts[1] is None else whole.split(parts[1])
    loss_mask = batch.kept_mask & batch.valid[:, None]
    if batch.trained is not None:
        loss_mask &= batch.trained[:, None]
    if plan.whiten:
        advantages = whiten(advantages, loss_mask)
    if plan.clip is not None:
        advantages = advantages.clamp(-plan.clip, plan.clip)
    return TrainBatch(
        sequences=batch,
        advantages=advantages,
        returns=returns,
        loss_mask=loss_mask,
    )


def _joined(whole: Joined, value: Any) -> Any:
    """A tensor, or the tensors in a mapping, of trajectories."""
    if isinstance(value, Mapping):
        return {name: whole.join(tensor) for name, tensor in value.items()}
    return whole.join(value)


def inputs_of(plan: AdvantagePlan) -> tuple[str, ...]:
    """Names of the tensors that the estimator takes."""
    return ADVANTAGES.describe(plan.name, plan.path).inputs


def token_rewards(batch: SequenceBatch) -> Tensor:
    """The batch's own, or each trajectory's reward on its last sampled token, [B, T] float32; 0 elsewhere, and for an empty
    response."""
    if batch.token_rewards is not None:
        return batch.token_rewards
    return torch.where(last_tokens(batch), batch.rewards[:, None], 0.0)


def last_tokens(batch: SequenceBatch) -> Tensor:
    """[B, T] bool, True on the last sampled token of each trajectory."""
    positions = torch.arange(1, batch.response_mask.shape[1] + 1, device=batch.rewards.device)
    is_last = batch.response_mask & (positions == batch.response_lengths[:, None])
    return is_last & batch.last_rows[:, None]


def _whitened_rewards(batch: SequenceBatch) -> Tensor:
    """Token rewards [B, T] of mean 0 and variance 1 over all sampled tokens of valid responses. Most tokens have reward 0,
    and get the same small offset."""
    return whiten(_kept_rewards(batch), batch.kept_mask & batch.valid[:, None])


def _kept_rewards(batch: SequenceBatch) -> Tensor:
    """Token rewards [B, T], where those of rejected tokens stand on the last token that was kept of their row, or of the row
    before in their trajectory: what a response was worth must not go with its last token."""
    rewards, kept = token_rewards(batch), batch.kept_mask
    if batch.rejected is None:
        return rewards
    positions = torch.arange(1, kept.shape[1] + 1, device=kept.device)
    is_last = kept & (positions == (kept * positions).amax(dim=1, keepdim=True))
    moved = torch.where(batch.response_mask & ~kept, rewards, 0.0).sum(dim=1, keepdim=True)
    empty, trajectories = ~kept.any(dim=1), batch.trajectories
    for row in (empty & (moved[:, 0] != 0)).nonzero()[:, 0].tolist():
        before = ((trajectories[:row] == trajectories[row]) & ~empty[:row]).nonzero()[:, 0]
        if len(before):
            moved[before[-1]] += moved[row]
    return torch.where(kept, rewards, 0.0) + torch.where(is_last, moved, 0.0)
