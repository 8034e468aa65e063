"""Tokens that the policy did not sample change no advantage and no loss: what an environment says, and rows in place of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batches import scored_batch, sequence_batch, shaped_batch
from posttrain.algos.objective import policy_objective
from posttrain.config.algorithm import LossConfig
from posttrain.records.batches import ShapedBatch, TrainerLogprobs
from posttrain.records.plans import AdvantagePlan, LossPlan
from posttrain.registry import ADVANTAGES, POLICY_LOSSES
from posttrain.steps.advantage import estimate_advantages

# Some look at rows, which are steps; for others a gap ends a turn, which is what they discount by.
ESTIMATORS = [
    name for name in ADVANTAGES.names() if not {"trajectory_index", "turn_begins"} & {*ADVANTAGES.inputs(name)}
]
WIDTH = 5
AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum_norm", "prompt_mean")


def a_batch(seed: int, rows: int = 4) -> tuple[ShapedBatch, Tensor]:
    """``rows`` responses of 1 to WIDTH tokens, in two groups, with everything that some estimator needs, and values."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, WIDTH + 1, (rows,), generator=draw)
    mask = torch.arange(WIDTH) < lengths[:, None]

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    token_rewards = torch.where(mask, numbers(rows, WIDTH), 0.0)
    sequences = sequence_batch(
        tokens=torch.zeros(rows, 1 + WIDTH, dtype=torch.int64),
        prompt_lengths=torch.ones(rows, dtype=torch.int64),
        response_mask=mask,
        rollout_logprobs=torch.where(mask, -numbers(rows, WIDTH).abs(), 0.0),
        group_index=torch.arange(rows) // 2,
    )
    terms, greedy = {"a": numbers(rows), "b": numbers(rows)}, numbers(rows)
    old = torch.where(mask, -numbers(rows, WIDTH).abs(), 0.0)
    pi = torch.where(mask, torch.rand(rows, WIDTH, generator=draw), 0.0)
    values, process = (torch.where(mask, numbers(rows, WIDTH), 0.0) for _ in range(2))
    scored = scored_batch(
        sequences,
        rewards=token_rewards.sum(dim=1),
        valid=torch.arange(rows) != 1,
        reward_terms=terms,
        extras={"greedy_rewards": greedy, "sum_pi_squared": pi, "process_rewards": process},
    )
    return shaped_batch(scored, TrainerLogprobs(old=old, ref=old - pi), token_rewards=token_rewards), values


def rearranged(shaped: ShapedBatch, change: Callable[[Tensor, float], Tensor], **fields: Any) -> ShapedBatch:
    """The batch with ``change(values, garbage)`` in place of every [B, T] tensor; rewards and masks have 0 for garbage."""
    old, ref, rewards, scored = shaped.logprobs.old, shaped.logprobs.ref, shaped.token_rewards, shaped.scored
    assert old is not None and ref is not None and rewards is not None
    mask = change(scored.sequences.response_mask, 0.0)
    sequences = replace(
        scored.sequences,
        tokens=torch.zeros(len(mask), 1 + mask.shape[1], dtype=torch.int64),
        response_mask=mask,
        rollout_logprobs=change(scored.sequences.rollout_logprobs, 7.0),
        **fields,
    )
    of_tokens = ("sum_pi_squared", "process_rewards")
    extras = {**scored.extras, **{key: change(scored.extras[key], 7.0) for key in of_tokens}}
    return replace(
        shaped,
        scored=replace(scored, sequences=sequences, extras=extras),
        logprobs=replace(shaped.logprobs, old=change(old, 7.0), ref=change(ref, 7.0)),
        token_rewards=change(rewards, 0.0),
    )


def spread(values: Tensor, columns: Tensor, width: int, garbage: float) -> Tensor:
    """[B, T] into ``width`` columns, those of each row at ``columns`` [B, T]; garbage in between."""
    wide = torch.full((len(values), width), garbage).to(values.dtype)
    return wide.scatter(1, columns, values)


def with_gaps(shaped: ShapedBatch, columns: Tensor) -> ShapedBatch:
    width = int(columns.max()) + 1
    return rearranged(shaped, lambda values, garbage: spread(values, columns, width, garbage))


def gaps(seed: int, rows: int) -> Tensor:
    """[B, T] rising columns with gaps of up to three."""
    draw = torch.Generator().manual_seed(seed)
    return (torch.randint(1, 4, (rows, WIDTH), generator=draw)).cumsum(dim=1) - 1


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=15)
@given(seed=st.integers(0, 10_000))
def test_advantages_pass_over_gaps(name: str, seed: int) -> None:
    (shaped, values), columns = a_batch(seed), gaps(seed + 1, 4)
    mask, wide_values = shaped.sequences.response_mask, spread(values, columns, int(columns.max()) + 1, 7.0)
    plan = AdvantagePlan(name=name, whiten=True, whiten_rewards=seed % 2 == 0)
    plain = estimate_advantages(shaped, values, plan)
    gapped = estimate_advantages(with_gaps(shaped, columns), wide_values, plan)
    found = gapped.advantages.gather(1, columns)
    torch.testing.assert_close(torch.where(mask, found, 0.0), torch.where(mask, plain.advantages, 0.0))
    assert not gapped.advantages[~gapped.sequences.response_mask].any()
    assert (plain.critic is None) == (gapped.critic is None)
    if plain.critic is not None and gapped.critic is not None:
        returns = torch.where(mask, gapped.critic.returns.gather(1, columns), 0.0)
        torch.testing.assert_close(returns, plain.critic.returns)


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=15)
@given(seed=st.integers(0, 10_000))
def test_a_trajectory_in_several_rows_is_one(name: str, seed: int) -> None:
    """Rows 0 and 1, 2 and 3, … are halves of trajectories; the same in one row each must give the same advantages."""
    halves, values = a_batch(seed, rows=8)
    trajectory = torch.arange(8) // 2
    whole = torch.zeros(4).index_add(0, trajectory, halves.rewards)[trajectory]
    scored = replace(
        halves.scored,
        sequences=replace(halves.sequences, group_index=trajectory // 2, trajectory_index=trajectory),
        rewards=whole,
        valid=trajectory != 1,
        reward_terms={key: value[trajectory * 2] for key, value in halves.scored.reward_terms.items()},
        extras={**halves.scored.extras, "greedy_rewards": halves.scored.extras["greedy_rewards"][trajectory // 2]},
    )
    halves = replace(halves, scored=scored, rewards=whole)

    def side_by_side(values: Tensor, garbage: float = 0.0) -> Tensor:
        return torch.cat([values[0::2], values[1::2]], dim=1)

    def first(values: Tensor) -> Tensor:
        return values[0::2]

    joined = rearranged(
        halves,
        side_by_side,
        prompt_lengths=first(scored.sequences.prompt_lengths),
        group_index=first(scored.sequences.group_index),
        trajectory_index=torch.arange(4),
        sample_ids=scored.sequences.sample_ids[0::2],
    )
    extras = {**joined.scored.extras, "greedy_rewards": first(scored.extras["greedy_rewards"])}
    of_first = replace(
        joined.scored,
        rewards=first(whole),
        valid=first(scored.valid),
        trained=first(scored.trained),
        reward_terms={key: first(value) for key, value in scored.reward_terms.items()},
        extras=extras,
    )
    joined = replace(joined, scored=of_first, rewards=first(whole))
    plan = AdvantagePlan(name=name)
    apart = estimate_advantages(halves, values, plan)
    together = estimate_advantages(joined, side_by_side(values), plan)
    torch.testing.assert_close(side_by_side(apart.advantages), together.advantages)


# Two choose single tokens by their place: clip_cov at random, kl_cov where several are equally far out.
LOSSES = [name for name in POLICY_LOSSES.names() if "mini_batch_tokens" not in POLICY_LOSSES.inputs(name)]


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=10)
@given(seed=st.integers(0, 10_000), aggregation=st.sampled_from(AGGREGATIONS))
def test_losses_pass_over_gaps(name: str, seed: int, aggregation: str) -> None:
    (shaped, _), columns = a_batch(seed), gaps(seed + 1, 4)
    needed = {key: each.example() for key, each in POLICY_LOSSES.settings(name).items() if each.required}
    section = LossConfig.model_validate({"name": name, **needed})
    plan = LossPlan(
        name=name,
        parameters=section.settings,
        aggregation=aggregation,
        norm_tokens=WIDTH,
        temperature=1.0,
        sft_coef=0.1,
        entropy_coef=0.1,
        kl_coef=0.1,
    )
    mask, old = shaped.sequences.response_mask, shaped.logprobs.old
    assert old is not None
    width = int(columns.max()) + 1
    wide = with_gaps(shaped, columns)
    shaped = replace(shaped, logprobs=replace(shaped.logprobs, ref=old - 0.1))
    wide = replace(wide, logprobs=replace(wide.logprobs, ref=spread(old - 0.1, columns, width, 7.0)))
    policy = torch.where(mask, old + 0.2 * shaped.rewards[:, None].tanh(), 0.0)
    found = []
    for batch, logprobs in ((shaped, policy), (wide, spread(policy, columns, width, 7.0))):
        train = estimate_advantages(batch, None, AdvantagePlan(name="grpo"))
        logprobs = logprobs.clone().requires_grad_()
        loss, sums = policy_objective(logprobs, -logprobs, train, plan, train.counts())
        loss.backward()
        assert logprobs.grad is not None
        found.append((loss.detach(), sums, logprobs.grad))
    (loss, sums, gradient), (wide_loss, wide_sums, wide_gradient) = found
    torch.testing.assert_close(wide_loss, loss)
    assert wide_sums == pytest.approx(sums, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(wide_gradient.gather(1, columns), gradient)
    untouched = wide_gradient.scatter(1, columns, 0.0)
    assert not untouched.any()
