"""Proximal log-probs by the versions of the weights, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from batches import sequence_batch, train_batch
from posttrain.algos.objective import policy_objective
from posttrain.algos.proximal import interpolated_logprobs, proximal_share
from posttrain.records.batches import TrainBatch
from posttrain.records.plans import LossPlan, RolloutCorrectionPlan

VERSIONS = torch.tensor([[0, 1], [2, 3]])


@pytest.mark.parametrize(
    ("proximal", "policy", "share"),
    [
        # (3 - v) / (4 - v): 3/4, 2/3, 1/2, 0
        (3, 4, [[3 / 4, 2 / 3], [1 / 2, 0]]),
        # (3 - v) / (6 - v): 3/6, 2/5, 1/4, 0
        (3, 6, [[3 / 6, 2 / 5], [1 / 4, 0]]),
        # The policy has not moved since the start of the step: it is the proximal one.
        (3, 3, [[1, 1], [1, 1]]),
    ],
)
def test_the_share_is_that_of_the_updates(proximal: int, policy: int, share: list[list[float]]) -> None:
    found = proximal_share(VERSIONS, proximal=proximal, policy=policy)
    torch.testing.assert_close(found, torch.tensor(share, dtype=torch.float32))


def test_log_probs_are_interpolated_and_carry_no_gradient() -> None:
    policy = torch.tensor([[-1.5, -2.2, math.nan]], requires_grad=True)
    rollout = torch.tensor([[-1.0, -2.0, math.nan]])
    mask = torch.tensor([[True, True, False]])
    # -1 + 3/4 x -0.5 = -1.375; -2 + 1/2 x -0.2 = -2.1
    found = interpolated_logprobs(policy, rollout, torch.tensor([[0.75, 0.5, 0.0]]), mask)
    assert found.tolist() == [pytest.approx([-1.375, -2.1, 0.0])]
    assert not found.requires_grad


def batch(share: float) -> TrainBatch:
    sequences = sequence_batch(
        tokens=torch.zeros(2, 3, dtype=torch.int64),
        prompt_lengths=torch.ones(2, dtype=torch.int64),
        response_mask=torch.ones(2, 2, dtype=torch.bool),
        rollout_logprobs=torch.full((2, 2), -2.0),
    )
    return train_batch(sequences, advantages=torch.ones(2, 2), proximal_share=torch.full((2, 2), share))


def plan(level: str = "token", high: float = 9.0, low: float | None = None) -> LossPlan:
    correction = RolloutCorrectionPlan(weights=level, weight_high=high, weight_low=low, interpolated=True)
    return LossPlan(name="ppo_clip", aggregation="token_mean", temperature=1.0, correction=correction)


@pytest.mark.parametrize(
    ("given", "weights"),
    [
        # log pi - log pi_behaviour = 2 ln 2 and 4 ln 2, half of which lies before the start of the step: w = 2 and 4.
        ({}, [2.0, 4.0]),
        ({"high": 3.0}, [2.0, 3.0]),
        ({"low": 1.0, "high": 3.0}, [2.0, 0.0]),
        ({"level": "sequence"}, [8.0, 8.0]),
    ],
)
def test_decoupled_ppo_without_a_forward_pass(given: dict[str, object], weights: list[float]) -> None:
    """The ratio is the other half: r = 2 and 4 with the advantage 1, clipped to 1.2."""
    policy = torch.tensor([[-2.0 + 2 * math.log(2), -2.0 + 4 * math.log(2)]] * 2, requires_grad=True)
    train = batch(share=0.5)
    loss, sums = policy_objective(policy, torch.zeros(2, 2), train, plan(**given), train.counts())  # type: ignore[arg-type]
    assert loss.item() == pytest.approx(-1.2 * sum(weights) / 2, rel=1e-5)
    assert sums["policy/ratio_mean"] == pytest.approx(2 * (2 + 4), rel=1e-5)
    assert sums["policy/importance_weight"] == pytest.approx(2 * sum(weights), rel=1e-5)


def test_the_first_update_equals_the_recomputed_one() -> None:
    """There the policy is the proximal one: the ratio is 1, and the whole gap is in the weights."""
    logprobs = torch.tensor([[-1.0, -1.5], [-2.5, -2.0]])
    interpolated = batch(share=1.0)
    weights = (logprobs + 2.0).exp()
    recomputed = replace(
        interpolated,
        logprobs=replace(interpolated.logprobs, proximal_share=None, old=logprobs, importance_weights=weights),
    )
    results = []
    for train in (interpolated, recomputed):
        policy = logprobs.clone().requires_grad_()
        loss, _ = policy_objective(policy, torch.zeros(2, 2), train, plan(), train.counts())
        loss.backward()
        results.append((loss.detach(), policy.grad))
    torch.testing.assert_close(results[0], results[1])


def test_micro_batches_change_nothing() -> None:
    policy = torch.tensor([[-1.0, -1.5], [-2.5, -2.0]])
    train = batch(share=0.5)
    whole, _ = policy_objective(policy, torch.zeros(2, 2), train, plan("sequence"), train.counts())
    parts = [
        policy_objective(policy[row : row + 1], torch.zeros(1, 2), train.rows([row]), plan("sequence"), train.counts())[
            0
        ]
        for row in (0, 1)
    ]
    torch.testing.assert_close(sum(parts), whole)
