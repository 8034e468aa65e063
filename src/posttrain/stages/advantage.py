"""From rewards to what each token is worth."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from posttrain.algos.statistics import whiten
from posttrain.errors import Problem, RequestError
from posttrain.records.batches import SequenceBatch, TrainBatch
from posttrain.records.plans import AdvantagePlan
from posttrain.registry import ADVANTAGES


def estimate_advantages(batch: SequenceBatch, plan: AdvantagePlan) -> TrainBatch:
    """A_{i,t} by the chosen estimator, whitened and clipped when asked for. Responses without a valid reward are left out of
    the loss.

    An estimator names what it needs by its positional parameters, among the names below.

    Raises: RequestError when it needs something that no role has supplied.
    """
    available = {
        "rewards": batch.rewards,
        "token_rewards": _whitened_rewards(batch) if plan.whiten_rewards else token_rewards(batch),
        "valid": batch.valid,
        "group_index": batch.group_index,
        "response_mask": batch.response_mask,
        "old_logprobs": batch.old_logprobs,
        "values": batch.values,
    }
    estimator = ADVANTAGES.get(plan.name)
    parameters = inspect.signature(estimator).parameters.values()
    needed = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
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
    result = estimator(*(available[name] for name in needed), **plan.parameters)
    advantages, returns = result if isinstance(result, tuple) else (result, None)
    loss_mask = batch.response_mask & batch.valid[:, None]
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


def token_rewards(batch: SequenceBatch) -> Tensor:
    """The batch's own, or each response's reward on its last sampled token, [B, T] float32; 0 elsewhere, and for an empty
    response."""
    if batch.token_rewards is not None:
        return batch.token_rewards
    positions = torch.arange(1, batch.response_mask.shape[1] + 1, device=batch.rewards.device)
    is_last = batch.response_mask & (positions == batch.response_lengths[:, None])
    return torch.where(is_last, batch.rewards[:, None], 0.0)


def _whitened_rewards(batch: SequenceBatch) -> Tensor:
    """Token rewards [B, T] of mean 0 and variance 1 over all sampled tokens of valid responses. Most tokens have reward 0,
    and get the same small offset."""
    return whiten(token_rewards(batch), batch.response_mask & batch.valid[:, None])
