"""Reward shaping: everything that is applied to scores before advantages are estimated, in this order (docs/rewards.md):

outcomes:  overlong penalty, zero for what did not stop    (shape_outcomes; here the group filter looks)
rewards:   mean and std, clip                              (shape_rewards)
tokens:    KL to the reference                             (shape_rewards)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from posttrain.algos.kl import token_kl
from posttrain.algos.kl_control import next_kl_coef
from posttrain.algos.kl_reward import penalize_kl, sums_of_rows
from posttrain.algos.overlong import overlong_penalty
from posttrain.algos.reward_normalization import RunningMoments, normalize_rewards
from posttrain.records.batches import ScoredBatch, ShapedBatch, TrainerLogprobs
from posttrain.records.computed_tensors import by_rows, of_each_row
from posttrain.records.plans import KlRewardPlan, RewardPlan
from posttrain.records.span_tensors import kept_rows
from posttrain.records.trajectories import Outcome, Reward, ScoredGroup, StopReason, Trajectory


class RewardState:
    """Running statistics and the steered KL coefficient, kept from step to step and saved in checkpoints."""

    def __init__(self, kl: KlRewardPlan):
        self._kl = kl
        self.kl_coef = kl.coef  # for the next step
        self.moments = RunningMoments()
        self.metrics: dict[str, float] = {}  # of this step

    def state(self) -> dict[str, Any]:
        """Plain values for ``restore``."""
        return {"moments": asdict(self.moments), "kl_coef": self.kl_coef, "kl_coef_at_start": self._kl.coef}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken. The coefficient starts over when the configured start has changed, or it is no
        longer steered."""
        self.moments = RunningMoments(**state["moments"])
        if self._kl.target is not None and state["kl_coef_at_start"] == self._kl.coef:
            self.kl_coef = float(state["kl_coef"])


def shape_outcomes(groups: Sequence[ScoredGroup], plan: RewardPlan) -> list[ScoredGroup]:
    """Rewards after the rules about a response's end. What the overlong rule takes is kept beside the terms, by its name."""
    return [group.map_outcomes(lambda trajectory, outcome: _shaped(outcome, trajectory, plan)) for group in groups]


def _shaped(outcome: Outcome, trajectory: Trajectory, plan: RewardPlan) -> Outcome:
    if not isinstance(outcome, Reward):
        return outcome
    if plan.overlong_buffer_tokens is not None:
        change = overlong_penalty(
            len(trajectory.token_ids),
            max_response_tokens=plan.max_response_tokens,
            buffer_tokens=plan.overlong_buffer_tokens,
            penalty=plan.overlong_penalty,
        )
        outcome = Reward(outcome.value + change, (*outcome.terms, ("overlong", change)), outcome.texts)
    if plan.zero_unless_stopped and trajectory.stop_reason is StopReason.LENGTH:
        outcome = replace(outcome, value=0.0, by_turn=False)
    return outcome if plan.by_turn else replace(outcome, by_turn=False)


def shape_rewards(scored: ScoredBatch, logprobs: TrainerLogprobs, plan: RewardPlan, state: RewardState) -> ShapedBatch:
    """Normalise and clip the rewards, and take the KL from those of tokens where the plan has one (it needs old and reference
    log-probs). Responses without a valid reward have no part in any of it. Measurements are left in ``state.metrics``."""
    state.metrics = {}
    last = scored.sequences.last_rows  # a trajectory counts once, however many rows it has
    rewards, valid = scored.rewards[last], scored.valid[last]
    groups = scored.sequences.group_index[last]
    parts = None if scored.part_index is None else scored.part_index[last]
    per_trajectory = _clipped(_normalized(rewards, valid, groups, parts, plan, state), valid, plan, state)
    shaped = _with_rewards(scored, logprobs, per_trajectory[last.long().cumsum(0) - last.long()])
    shaped = _less_divergence(shaped, plan.kl, state) if plan.kl.coef else shaped
    return shaped if plan.clip_tokens is None else _with_clipped_tokens(shaped, plan.clip_tokens)


def _with_rewards(scored: ScoredBatch, logprobs: TrainerLogprobs, rewards: Tensor) -> ShapedBatch:
    """The batch with other rewards [B]. Where rewards stand on tokens, the change is put on the last token of the trajectory:
    turns keep what they were given."""
    placed = scored.turn_rewards
    if placed is not None:
        change = torch.where(scored.sequences.last_rows, rewards - scored.rewards, 0.0)
        placed = placed + torch.where(scored.sequences.last_tokens, change[:, None], 0.0)
    return ShapedBatch(scored=scored, logprobs=logprobs, rewards=rewards, token_rewards=placed)


def _normalized(
    rewards: Tensor, valid: Tensor, groups: Tensor, parts: Tensor | None, plan: RewardPlan, state: RewardState
) -> Tensor:
    """The run's moments take the step's rewards in first, so that the first step has something to be measured by."""
    if plan.normalize_mean == plan.normalize_std == "none":
        return rewards
    if "running" in (plan.normalize_mean, plan.normalize_std):
        state.moments = state.moments.with_rewards(rewards[valid])
        state.metrics["reward/running_mean"] = state.moments.mean
        state.metrics["reward/running_std"] = state.moments.std
    return normalize_rewards(
        rewards, valid, groups, state.moments, mean=plan.normalize_mean, std=plan.normalize_std, part_index=parts
    )


def _clipped(rewards: Tensor, valid: Tensor, plan: RewardPlan, state: RewardState) -> Tensor:
    if plan.clip is None:
        return rewards
    beyond = (rewards.abs() > plan.clip) & valid
    state.metrics["reward/clip_fraction"] = int(beyond.sum()) / max(int(valid.sum()), 1)
    return rewards.clamp(-plan.clip, plan.clip)


def _less_divergence(shaped: ShapedBatch, plan: KlRewardPlan, state: RewardState) -> ShapedBatch:
    """Take coef x KL(old || reference) from every token's reward; then steer the coefficient for the next step."""
    valid = shaped.scored.valid
    mask = kept_rows(shaped.sequences.response_mask, valid)
    kl = _kl_of_tokens(shaped.logprobs, mask, plan.estimator)
    rewards, sums, measured = penalize_kl(shaped.rewards_on_tokens(), kl, mask, kl_coef=state.kl_coef)
    state.metrics |= {"reward/kl": measured, "reward/kl_coef": state.kl_coef}
    if math.isfinite(measured):  # otherwise the step's loss is not finite either, and the step is skipped
        sequences = int(valid.sum())
        state.kl_coef = next_kl_coef(
            state.kl_coef, measured, sequences, target_kl=plan.target, horizon=plan.horizon_sequences
        )
    return _with_token_rewards(shaped, rewards, sums)


def _with_clipped_tokens(shaped: ShapedBatch, clip: float) -> ShapedBatch:
    """The batch with rewards of tokens cut to plus or minus clip."""
    placed = shaped.rewards_on_tokens()
    clipped = by_rows(partial(torch.clamp, min=-clip, max=clip), placed, dtype=placed.dtype)
    return _with_token_rewards(shaped, clipped, of_each_row(sums_of_rows, clipped).squeeze(1))


def _with_token_rewards(shaped: ShapedBatch, token_rewards: Tensor, sums: Tensor) -> ShapedBatch:
    """The batch with other rewards of tokens [B, T]; a trajectory's reward, on each of its rows, is the sum over them.

    Args: sums of the rows' tokens [B].
    """
    trajectories = shaped.sequences.trajectory_index
    whole = torch.zeros_like(shaped.rewards).index_add(0, trajectories, sums)
    return replace(shaped, token_rewards=token_rewards, rewards=whole[trajectories])


def _kl_of_tokens(logprobs: TrainerLogprobs, mask: Tensor, estimator: str) -> Tensor:
    """KL(old || reference) at every token, [B, T] nats: over the vocabulary, or estimated from the sampled tokens."""
    if estimator == "full":
        assert logprobs.full_kl is not None, "a KL over the vocabulary is computed before the rewards"
        return logprobs.full_kl
    assert logprobs.old is not None and logprobs.ref is not None, "the KL compares old with reference log-probs"
    return by_rows(partial(token_kl, estimator), logprobs.old, logprobs.ref, mask, dtype=logprobs.old.dtype)
