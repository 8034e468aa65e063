"""Estimate advantages: a value for every token, from the rewards of whole responses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from posttrain.algos.statistics import whiten_parts
from posttrain.errors import Problem, RequestError
from posttrain.records.batches import CriticTargets, SequenceBatch, ShapedBatch, TrainBatch
from posttrain.records.joined import has_single_rows, joined
from posttrain.records.plans import AdvantagePlan
from posttrain.records.span_tensors import spread, with_values
from posttrain.registry import ADVANTAGES
from posttrain.steps.per_response import per_response
from posttrain.steps.token_inputs import TOKEN_INPUTS


def estimate_advantages(shaped: ShapedBatch, values: Tensor | None, plan: AdvantagePlan) -> TrainBatch:
    """A_{i,t} by the chosen estimator, then whitened and clipped as in the plan. Responses without a valid reward are left
    out of the loss.

    Args: values [B, T], the critic's; None without one.
    Raises: RequestError when the estimator needs something that no role has computed.
    """
    if shaped.teachers_alone:
        return with_advantages(shaped, spread(torch.zeros(len(shaped.rewards)), shaped.sequences.response_mask), plan)
    advantages, returns = _run_estimator(plan, shaped.sequences, estimator_inputs(shaped, values, plan))
    critic = CriticTargets(values=values, returns=returns) if values is not None and returns is not None else None
    return with_advantages(shaped, advantages, plan, critic)


def with_advantages(
    shaped: ShapedBatch, advantages: Tensor, plan: AdvantagePlan, critic: CriticTargets | None = None
) -> TrainBatch:
    """The input of the update from advantages [B, T], less what teachers take from them, whitened and clipped as in the plan."""
    batch, scored = shaped.sequences, shaped.scored
    loss_mask = shaped.loss_mask
    if shaped.penalty is not None:
        advantages = torch.where(loss_mask, advantages - shaped.penalty, 0.0)
    if plan.whiten:
        advantages = whiten_parts(advantages, loss_mask, scored.part_index)
    if plan.clip is not None:
        advantages = with_values(advantages, partial(torch.clamp, min=-plan.clip, max=plan.clip))
    return TrainBatch(
        sequences=batch,
        scores=scored.rewards,
        logprobs=shaped.logprobs,
        advantages=advantages,
        loss_mask=loss_mask,
        weights=scored.weights,
        critic=critic,
        teachers=shaped.teachers,
        divergence=shaped.divergence,
    )


def estimator_inputs(shaped: ShapedBatch, values: Tensor | None, plan: AdvantagePlan) -> dict[str, Any]:
    """Everything that an estimator may name as a positional parameter; None or absent: not computed in this run, or, of
    TOKEN_INPUTS, not named by this one.

    Tokens that rollout correction has rejected count as not sampled, for estimators as for the loss.
    """
    batch, scored = shaped.sequences, shaped.scored
    mask = shaped.logprobs.kept(batch.response_mask)
    return {
        "rewards": shaped.rewards,  # [B], normalised and clipped, less the KL
        "reward_terms": scored.reward_terms,  # name -> [B], as scored
        "valid": scored.valid,  # [B]
        "group_index": batch.group_index,  # [B]
        "response_mask": mask,  # [B, T]
        "old_logprobs": shaped.logprobs.old,  # [B, T]
        "ref_logprobs": shaped.logprobs.ref,  # [B, T]
        "values": values,  # [B, T]
        "episode_rewards": shaped.rewards,  # [B]
        "step_rewards": None if scored.turn_rewards is None else scored.turn_rewards.sum(dim=1),
        "turn_penalties": torch.zeros_like(shaped.rewards),  # [B], of the row's own turn
        "trajectory_index": batch.trajectory_index,  # [B]
        "step_index": batch.step_index,  # [B]
        **{name: make(shaped, plan) for name, make in TOKEN_INPUTS.items() if name in inputs_of(plan)},
        **scored.extras,
    }


def _run_estimator(
    plan: AdvantagePlan, batch: SequenceBatch, available: Mapping[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Advantages and, from estimators that compute them, returns; both [B, T].

    An estimator reads trajectories, each joined into one row of sampled tokens, unless it names trajectory_index: then it reads
    the rows of the batch, which are steps of an environment. Of one number per response no token is needed.
    """
    estimator, needed = ADVANTAGES.get(plan.name, plan.path), inputs_of(plan)
    optional = ADVANTAGES.describe(plan.name, plan.path).optional
    if missing := [name for name in needed if available.get(name) is None and name not in optional]:
        absent = (
            f"needs {' and '.join(missing)}, and this run has no role that computes {'them' if missing[1:] else 'it'}"
        )
        fix = "choose another estimator, such as advantage.name=grpo"
        raise RequestError(Problem(f"the advantage estimator {plan.name} {absent}", fix=fix, field="advantage.name"))
    if plan.path is None and ADVANTAGES.facts(plan.name).per_response:
        return per_response(estimator, plan, batch, {name: available[name] for name in needed}), None
    inputs = [available[name] for name in needed]
    computes_rows = plan.path is None and ADVANTAGES.facts(plan.name).by_rows
    if "trajectory_index" in needed or (computes_rows and has_single_rows(batch)):
        return _both(estimator(*inputs, **plan.parameters))
    whole = joined(batch)
    inputs = [None if each is None else whole.join_all(each) for each in inputs]
    if "response_tokens" in needed:
        place = needed.index("response_tokens")
        inputs[place] = inputs[place].masked_fill(~whole.join(available["response_mask"]), plan.pad_token)
    advantages, returns = _both(estimator(*inputs, **plan.parameters))
    return whole.split(advantages), None if returns is None else whole.split(returns)


def _both(result: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
    return result if isinstance(result, tuple) else (result, None)


def inputs_of(plan: AdvantagePlan) -> tuple[str, ...]:
    """Names of the inputs that the estimator takes."""
    return ADVANTAGES.describe(plan.name, plan.path).inputs
