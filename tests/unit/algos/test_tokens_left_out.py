"""Tokens that leave the policy loss alone: of responses far from the sampler, and of low entropy; by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from batches import sequence_batch, train_batch
from posttrain.algos.high_entropy import high_entropy_tokens
from posttrain.algos.objective import policy_objective
from posttrain.algos.off_policy_mask import off_policy_tokens
from posttrain.errors import ShapeError
from posttrain.records.batches import TrainBatch
from posttrain.records.plans import LossPlan

NAN = math.nan
MASK = torch.tensor([[True, True], [True, True], [True, False]])


def test_responses_the_policy_left_are_masked_where_their_advantage_is_negative() -> None:
    # sampler - policy, mean per row: (0.5 + 0.1) / 2 = 0.3; 0.3; 0.1 (the second token is masked)
    policy = torch.tensor([[-1.5, -1.1], [-1.5, -1.1], [-1.1, NAN]])
    sampler = torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [-1.0, 9.0]])
    advantages = torch.tensor([[-1.0, -1.0], [-1.0, 2.0], [-1.0, -1.0]])

    def masked(limit: float) -> list[list[bool]]:
        return off_policy_tokens(policy, sampler, advantages, MASK, limit=limit).tolist()

    assert masked(0.2) == [[True, True], [True, False], [False, False]]
    assert masked(0.05) == [[True, True], [True, False], [True, False]]
    assert masked(0.31) == [[False, False], [False, False], [False, False]]


def test_the_tokens_of_highest_entropy() -> None:
    entropies = torch.tensor([[0.1, 0.9], [0.5, 0.3], [0.7, 99.0]])  # five tokens; 99 stands behind the mask
    assert high_entropy_tokens(entropies, MASK, share=0.2).tolist() == [[False, True], [False, False], [False, False]]
    # 0.41 x 5 = 2.05, rounded up to 3: 0.9, 0.7, 0.5
    assert high_entropy_tokens(entropies, MASK, share=0.41).tolist() == [[False, True], [True, False], [True, False]]
    # 0.4 x 5 = 2, and stays 2
    assert high_entropy_tokens(entropies, MASK, share=0.4).sum() == 2
    assert high_entropy_tokens(entropies, MASK, share=1.0).equal(MASK)


def test_ties_stay_and_nan_goes() -> None:
    equal = torch.full((3, 2), 0.5)
    assert high_entropy_tokens(equal, MASK, share=0.2).equal(MASK)
    broken = torch.tensor([[NAN, 0.2], [0.1, 0.0], [NAN, NAN]])
    assert high_entropy_tokens(broken, MASK, share=0.2).tolist() == [[False, True], [False, False], [False, False]]
    nothing = torch.zeros(3, 2, dtype=torch.bool)
    assert not high_entropy_tokens(equal, nothing, share=0.2).any()
    with pytest.raises(ShapeError, match="mask"):
        high_entropy_tokens(equal, MASK[:, :1], share=0.2)


def batch(**given: Any) -> TrainBatch:
    """Two rows of two tokens with advantages 1 and -1; the sampler's log-probs are -1."""
    sequences = sequence_batch(
        tokens=torch.zeros(2, 3, dtype=torch.int64),
        prompt_lengths=torch.ones(2, dtype=torch.int64),
        response_mask=torch.ones(2, 2, dtype=torch.bool),
        rollout_logprobs=torch.full((2, 2), -1.0),
        group_index=torch.zeros(2, dtype=torch.int64),
        sample_ids=("a", "b"),
    )
    advantages = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    return train_batch(sequences, advantages=advantages, loss_mask=torch.ones(2, 2, dtype=torch.bool), **given)


def gradient(plan: LossPlan, train: TrainBatch, policy: float = -1.5) -> tuple[Tensor, dict[str, float]]:
    logprobs = torch.full((2, 2), policy, requires_grad=True)
    loss, sums = policy_objective(logprobs, torch.zeros(2, 2), train, plan, train.counts())
    return torch.autograd.grad(loss, logprobs)[0], sums


PLAN = LossPlan(name="gpg", aggregation="token_mean", temperature=1.0)  # its gradient is -A / 4 tokens


def test_the_masks_leave_the_divisor_and_the_other_terms() -> None:
    found, _ = gradient(PLAN, batch())
    assert found.tolist() == [[-0.25, -0.25], [0.25, 0.25]]
    found, sums = gradient(replace(PLAN, off_policy_limit=0.4), batch())  # -1 + 1.5 = 0.5 nats
    assert found.tolist() == [[-0.25, -0.25], [0, 0]]
    assert sums["policy/off_policy_fraction"] == 2
    found, sums = gradient(replace(PLAN, off_policy_limit=0.6), batch())
    assert found.tolist() == [[-0.25, -0.25], [0.25, 0.25]] and sums["policy/off_policy_fraction"] == 0
    chosen = replace(batch(), high_entropy=torch.tensor([[True, False], [False, False]]))
    found, sums = gradient(PLAN, chosen)
    assert found.tolist() == [[-0.25, 0], [0, 0]] and sums["policy/high_entropy_fraction"] == 1
    # the KL stays on all tokens: k2 of d = -1.5 + 1 has gradient d / 4 x coef
    with_kl = replace(PLAN, kl_coef=1.0, kl_estimator="k2")
    ref = replace(chosen, logprobs=replace(chosen.logprobs, ref=torch.full((2, 2), -1.0)))
    found, _ = gradient(with_kl, ref)
    assert found.tolist() == [[-0.375, -0.125], [-0.125, -0.125]]


def test_the_weighted_kl_reaches_the_objective() -> None:
    # d = ln 2, r = 2 against old log-probs: value 2 x 0.193147 per token, gradient 2 ln 2 / 4 (test_kl)
    ln2 = math.log(2)
    old = torch.full((2, 2), -1.0 - ln2)
    train = replace(batch(), advantages=torch.zeros(2, 2))
    train = replace(train, logprobs=replace(train.logprobs, ref=torch.full((2, 2), -1.0 - ln2), old=old))
    plan = replace(PLAN, kl_coef=1.0, kl_estimator="k3")
    found, sums = gradient(replace(plan, kl_importance_weighted=True), train, policy=-1.0)
    assert found.flatten().tolist() == pytest.approx([2 * ln2 / 4] * 4, abs=1e-6)
    assert sums["reference/kl"] == pytest.approx(4 * 2 * 0.193147, abs=1e-5)
    found, _ = gradient(plan, train, policy=-1.0)
    assert found.flatten().tolist() == pytest.approx([0.5 / 4] * 4, abs=1e-6)
