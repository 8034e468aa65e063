"""Tokens that the policy did not sample change no advantage and no loss: what an environment says, and rows in place of one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posttrain.algos.objective import policy_objective
from posttrain.build.plans import chosen_parameters
from posttrain.config.algorithm import LossConfig
from posttrain.records.batches import SequenceBatch
from posttrain.records.plans import AdvantagePlan, LossPlan
from posttrain.registry import ADVANTAGES, POLICY_LOSSES
from posttrain.steps.advantage import estimate_advantages

# Some look at rows, which are steps; for others a gap ends a turn, which is what they discount by.
ESTIMATORS = [
    name for name in ADVANTAGES.names() if not {"trajectory_index", "turn_begins"} & {*ADVANTAGES.inputs(name)}
]
WIDTH = 5
AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum_norm", "prompt_mean")


def a_batch(seed: int, rows: int = 4) -> SequenceBatch:
    """``rows`` responses of 1 to WIDTH tokens, in two groups, with everything that some estimator asks for."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, WIDTH + 1, (rows,), generator=draw)
    mask = torch.arange(WIDTH) < lengths[:, None]

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    token_rewards = torch.where(mask, numbers(rows, WIDTH), 0.0)
    rewards = token_rewards.sum(dim=1)
    return SequenceBatch(
        tokens=torch.zeros(rows, 1 + WIDTH, dtype=torch.int64),
        prompt_lengths=torch.ones(rows, dtype=torch.int64),
        response_mask=mask,
        rollout_logprobs=torch.where(mask, -numbers(rows, WIDTH).abs(), 0.0),
        rewards=rewards,
        valid=torch.arange(rows) != 1,
        group_index=torch.arange(rows) // 2,
        sample_ids=tuple(map(str, range(rows))),
        reward_terms={"a": numbers(rows), "b": numbers(rows)},
        greedy_rewards=numbers(rows),
        token_rewards=token_rewards,
        old_logprobs=torch.where(mask, -numbers(rows, WIDTH).abs(), 0.0),
        sum_pi_squared=torch.where(mask, torch.rand(rows, WIDTH, generator=draw), 0.0),
        values=torch.where(mask, numbers(rows, WIDTH), 0.0),
    )


def spread(values: Tensor, columns: Tensor, width: int, garbage: float) -> Tensor:
    """[B, T] into ``width`` columns, those of each row at ``columns`` [B, T]; garbage in between."""
    wide = torch.full((len(values), width), garbage).to(values.dtype)
    return wide.scatter(1, columns, values)


def with_gaps(batch: SequenceBatch, columns: Tensor, garbage: float) -> SequenceBatch:
    width = int(columns.max()) + 1
    token_rewards, old, pi, values = batch.token_rewards, batch.old_logprobs, batch.sum_pi_squared, batch.values
    assert token_rewards is not None and old is not None and pi is not None and values is not None
    return replace(
        batch,
        tokens=torch.zeros(len(batch), 1 + width, dtype=torch.int64),
        response_mask=spread(batch.response_mask, columns, width, 0.0),
        rollout_logprobs=spread(batch.rollout_logprobs, columns, width, garbage),
        token_rewards=spread(token_rewards, columns, width, 0.0),
        old_logprobs=spread(old, columns, width, garbage),
        sum_pi_squared=spread(pi, columns, width, garbage),
        values=spread(values, columns, width, garbage),
    )


def gaps(seed: int, rows: int) -> Tensor:
    """[B, T] rising columns with gaps of up to three."""
    draw = torch.Generator().manual_seed(seed)
    return (torch.randint(1, 4, (rows, WIDTH), generator=draw)).cumsum(dim=1) - 1


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=15)
@given(seed=st.integers(0, 10_000))
def test_advantages_pass_over_gaps(name: str, seed: int) -> None:
    batch, columns = a_batch(seed), gaps(seed + 1, 4)
    plan = AdvantagePlan(name=name, whiten=True, whiten_rewards=seed % 2 == 0)
    plain, gapped = estimate_advantages(batch, plan), estimate_advantages(with_gaps(batch, columns, 7.0), plan)
    found = gapped.advantages.gather(1, columns)
    torch.testing.assert_close(
        torch.where(batch.response_mask, found, 0.0), torch.where(batch.response_mask, plain.advantages, 0.0)
    )
    assert not gapped.advantages[~gapped.sequences.response_mask].any()
    if plain.returns is not None and gapped.returns is not None:
        returns = torch.where(batch.response_mask, gapped.returns.gather(1, columns), 0.0)
        torch.testing.assert_close(returns, plain.returns)


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=15)
@given(seed=st.integers(0, 10_000))
def test_a_trajectory_in_several_rows_is_one(name: str, seed: int) -> None:
    """Rows 0 and 1, 2 and 3, … are halves of trajectories; the same in one row each must give the same advantages."""
    halves = a_batch(seed, rows=8)
    trajectory = torch.arange(8) // 2
    whole = torch.zeros(4).index_add(0, trajectory, halves.rewards)
    same = {
        "rewards": whole[trajectory],
        "valid": (trajectory != 1),
        "group_index": trajectory // 2,
        "trajectory_index": trajectory,
    }
    terms = {key: value[trajectory * 2] for key, value in (halves.reward_terms or {}).items()}
    greedy = None if halves.greedy_rewards is None else halves.greedy_rewards[trajectory // 2]
    halves = replace(halves, **same, reward_terms=terms, greedy_rewards=greedy)
    first = halves.rows(list(range(0, 8, 2)))

    def side_by_side(values: Tensor | None) -> Tensor:
        assert values is not None
        return torch.cat([values[0::2], values[1::2]], dim=1)

    joined = replace(
        first,
        tokens=torch.zeros(4, 1 + 2 * WIDTH, dtype=torch.int64),
        trajectory_index=None,
        response_mask=side_by_side(halves.response_mask),
        rollout_logprobs=side_by_side(halves.rollout_logprobs),
        token_rewards=side_by_side(halves.token_rewards),
        old_logprobs=side_by_side(halves.old_logprobs),
        sum_pi_squared=side_by_side(halves.sum_pi_squared),
        values=side_by_side(halves.values),
    )
    plan = AdvantagePlan(name=name)
    apart, together = estimate_advantages(halves, plan), estimate_advantages(joined, plan)
    torch.testing.assert_close(side_by_side(apart.advantages), together.advantages)


# Two choose single tokens by their place: clip_cov at random, kl_cov where several are equally far out.
LOSSES = [name for name in POLICY_LOSSES.names() if "mini_batch_tokens" not in POLICY_LOSSES.inputs(name)]


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=10)
@given(seed=st.integers(0, 10_000), aggregation=st.sampled_from(AGGREGATIONS))
def test_losses_pass_over_gaps(name: str, seed: int, aggregation: str) -> None:
    batch, columns = a_batch(seed), gaps(seed + 1, 4)
    section = LossConfig(name=name, dro_beta=0.1)
    plan = LossPlan(
        name=name,
        parameters=chosen_parameters(POLICY_LOSSES.get(name), section),
        aggregation=aggregation,
        norm_tokens=WIDTH,
        temperature=1.0,
        sft_coef=0.1,
        entropy_coef=0.1,
        kl_coef=0.1,
    )
    assert batch.old_logprobs is not None
    batch = replace(batch, ref_logprobs=batch.old_logprobs - 0.1)
    wide = replace(
        with_gaps(batch, columns, 7.0),
        ref_logprobs=spread(batch.old_logprobs - 0.1, columns, int(columns.max()) + 1, 7.0),
    )
    policy = torch.where(batch.response_mask, batch.old_logprobs + 0.2 * batch.rewards[:, None].tanh(), 0.0)
    found = []
    for sequences, logprobs in ((batch, policy), (wide, spread(policy, columns, int(columns.max()) + 1, 7.0))):
        train = estimate_advantages(sequences, AdvantagePlan(name="grpo"))
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
