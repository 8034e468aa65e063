"""Estimators that look at every token, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from posttrain.algos.advantages.gae import gae
from posttrain.algos.advantages.optimal_token_baseline import optimal_token_baseline
from posttrain.algos.advantages.prime import prime
from posttrain.algos.advantages.reinforce_plus_plus import reinforce_plus_plus
from posttrain.algos.advantages.remax import remax
from posttrain.algos.advantages.tir_optimal_token_baseline import tir_optimal_token_baseline
from posttrain.algos.returns import returns_to_go
from posttrain.algos.statistics import whiten
from posttrain.errors import ShapeError

VALID = torch.tensor([True])


def mask_of(*rows: list[int]) -> Tensor:
    return torch.tensor(rows).bool()


def test_returns_skip_what_the_policy_did_not_sample() -> None:
    # from the end: 8; tool output carries it; 2 + 0.5 x 8 = 6; 1 + 0.5 x 6 = 4. The 100 on tool output is nobody's.
    returns = returns_to_go(torch.tensor([[1.0, 2.0, 100.0, 8.0, 0.0]]), mask_of([1, 1, 0, 1, 0]), gamma=0.5)
    assert returns.tolist() == [[4.0, 6.0, 0.0, 8.0, 0.0]]


def test_reinforce_plus_plus_whitens_the_returns() -> None:
    # one token each, returns 1, 2, 3: mean 2, sample variance 1
    rewards = torch.tensor([[1.0], [2.0], [3.0]])
    advantages = reinforce_plus_plus(rewards, torch.ones(3).bool(), torch.ones(3, 1).bool())
    assert advantages.flatten().tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-6)


def test_gae_without_whitening_stays_in_reward_units() -> None:
    # ROLL's own example: r = 0, 0, 1; V = .1, .2, .3; gamma 1, lambda .95. delta = .1, .1, .7:
    # A_3 = .7, A_2 = .1 + .95 x .7 = .765, A_1 = .1 + .95 x .765 = .82675; behind the mask 0
    advantages, returns = gae(
        torch.tensor([[0.0, 0.0, 1.0, 5.0]]), torch.tensor([[0.1, 0.2, 0.3, 5.0]]), VALID, mask_of([1, 1, 1, 0]),
        gae_lambda=0.95, estimator_whitens=False,
    )  # fmt: skip
    assert advantages[0].tolist() == pytest.approx([0.82675, 0.765, 0.7, 0.0])
    assert returns[0].tolist() == pytest.approx([0.92675, 0.965, 1.0, 0.0])  # A + V


def test_reinforce_plus_plus_leaves_invalid_responses_out_of_the_statistics() -> None:
    rewards = torch.tensor([[1.0], [math.nan], [3.0]])
    advantages = reinforce_plus_plus(rewards, torch.tensor([True, False, True]), torch.ones(3, 1).bool())
    # 1 and 3: mean 2, sample variance 2, so -+1 / sqrt(2)
    assert advantages.flatten().tolist() == pytest.approx([-0.70711, 0.0, 0.70711], abs=1e-5)


def test_equal_returns_are_exactly_zero_after_whitening() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        rewards = torch.zeros(7, 3, dtype=dtype)
        rewards[:, 2] = 0.9
        assert (reinforce_plus_plus(rewards, torch.ones(7).bool(), torch.ones(7, 3).bool()) == 0).all()


def test_remax_subtracts_the_greedy_reward() -> None:
    # returns: 1 + 2 = 3, then 2; minus 0.5
    advantages = remax(torch.tensor([[1.0, 2.0, 0.0]]), VALID, mask_of([1, 1, 0]), torch.tensor([0.5]))
    assert advantages.tolist() == [[2.5, 1.5, 0.0]]


def test_remax_leaves_out_a_response_whose_greedy_twin_was_not_scored() -> None:
    rewards, valid = torch.tensor([[1.0], [1.0]]), torch.tensor([True, True])
    assert remax(rewards, valid, mask_of([1], [1]), torch.tensor([math.nan, 0.0])).tolist() == [[0.0], [1.0]]


def test_gae_by_hand() -> None:
    # gamma 0.5, lambda 0.5; values 1, 2; reward 4 at the end
    # t=1: delta = 4 - 2 = 2, A = 2; t=0: delta = 0 + 0.5 x 2 - 1 = 0, A = 0 + 0.25 x 2 = 0.5
    # returns: 0.5 + 1 = 1.5, 2 + 2 = 4; whitening 0.5, 2: mean 1.25, sample std 1.06066: -+0.70711
    advantages, returns = gae(
        torch.tensor([[0.0, 4.0]]),
        torch.tensor([[1.0, 2.0]]),
        VALID,
        mask_of([1, 1]),
        gamma=0.5,
        gae_lambda=0.5,
    )
    assert returns.tolist() == [[1.5, 4.0]]
    assert advantages.tolist()[0] == pytest.approx([-0.70711, 0.70711], abs=1e-5)


def test_gae_carries_value_and_advantage_over_tool_output() -> None:
    with_tool = gae(
        torch.tensor([[0.0, 50.0, 4.0]]),
        torch.tensor([[1.0, -70.0, 2.0]]),
        VALID,
        mask_of([1, 0, 1]),
        gamma=0.5,
        gae_lambda=0.5,
    )
    assert with_tool[1].tolist() == [[1.5, 0.0, 4.0]]  # as above
    assert with_tool[0].tolist()[0] == pytest.approx([-0.70711, 0.0, 0.70711], abs=1e-5)


def test_gae_names_the_tensors_that_do_not_fit() -> None:
    with pytest.raises(ShapeError, match=r"values \[1, 3\]"):
        gae(torch.zeros(1, 2), torch.zeros(1, 3), VALID, mask_of([1, 1]))


def test_optimal_token_baseline_by_hand() -> None:
    # probabilities 0.5 everywhere and sum of squares 0.5: w = 1 - 1 + 0.5 = 0.5 per token, W = 0.5, 1.0
    # returns: row 0: 1, 1; row 1: 0. t=0: b = (1 x 0.5 + 0 x 0.5) / (0.5 + 0.5) = 0.5. t=1: only row 0 goes there: b = 0
    half = torch.full((2, 2), 0.5)
    advantages = optimal_token_baseline(
        torch.tensor([[0.0, 1.0], [0.0, 0.0]]),
        torch.tensor([True, True]),
        torch.tensor([0, 0]),
        mask_of([1, 1], [1, 0]),
        half.log(),
        half,
    )
    assert advantages.tolist()[0] == pytest.approx([0.5, 1.0], abs=1e-6)
    assert advantages.tolist()[1] == pytest.approx([-0.5, 0.0], abs=1e-6)


def test_tir_optimal_token_baseline_lines_up_sampled_tokens() -> None:
    # row 1 is row 1 of the case above behind a tool's token
    half = torch.full((2, 2), 0.5)
    advantages = tir_optimal_token_baseline(
        torch.tensor([[0.0, 1.0], [0.0, 0.0]]),
        torch.tensor([True, True]),
        torch.tensor([0, 0]),
        mask_of([1, 1], [0, 1]),
        half.log(),
        half,
    )
    assert advantages.tolist()[0] == pytest.approx([0.5, 1.0], abs=1e-6)
    assert advantages.tolist()[1] == pytest.approx([0.0, -0.5], abs=1e-6)


def test_whitening_one_entry_leaves_it_and_none_is_no_error() -> None:
    assert whiten(torch.tensor([3.0, 5.0]), torch.tensor([True, False])).tolist() == [3.0, 0.0]
    assert whiten(torch.tensor([3.0, math.nan]), torch.tensor([False, False])).tolist() == [0.0, 0.0]


def test_whitening_equal_entries_gives_exactly_zero() -> None:
    # the mean of six 0.7 is not 0.7, and the tiny difference over a tiny deviation is no longer tiny
    for dtype in (torch.float32, torch.float64):
        values = torch.full((6,), 0.7, dtype=dtype)
        assert (whiten(values, torch.ones(6).bool()) == 0).all()


def test_prime_adds_process_rewards_and_outcomes_each_against_the_other_responses() -> None:
    # two responses, weights 1 and 2; process rewards have the means 0.5 and 2: r x 2 - (0.5 + 2) is -0.5, -2.5 and 5.5, -2.5;
    # outcomes 1 and 0: 1 x 2 - 1 = 1 and -1, x 2 on the last token: -2.5 + 2 = -0.5 and -2.5 - 2 = -4.5
    # sums to the end: -1, -0.5 and 1, -4.5: mean -1.25, squares 0.0625 + 0.5625 + 5.0625 + 10.5625 = 16.25, / 3 = 5.416667
    rewards, valid = torch.tensor([1.0, 0.0, math.nan]), torch.tensor([True, True, False])
    process = torch.tensor([[1.0, 0.0], [4.0, 0.0], [7.0, 7.0]])
    groups, mask = torch.tensor([3, 3, 3]), torch.ones(3, 2).bool()
    found = prime(process, rewards, valid, groups, mask, process_weight=1.0, outcome_weight=2.0)
    std = math.sqrt(5.416667)
    expected = [[0.25 / std, 0.75 / std], [2.25 / std, -3.25 / std], [0.0, 0.0]]
    assert found.flatten().tolist() == pytest.approx([value for row in expected for value in row], abs=1e-6)
    alone = prime(process[:1], rewards[:1], valid[:1], groups[:1], mask[:1])
    assert not alone.any()


def test_prime_without_process_rewards_is_rloo_whitened() -> None:
    # RLOO of 1, 0, 0: 1, -0.5, -0.5; one token each: mean 0, variance (1 + 0.25 + 0.25) / 2 = 0.75
    rewards, ok = torch.tensor([1.0, 0.0, 0.0]), torch.ones(3).bool()
    found = prime(torch.ones(3, 1), rewards, ok, torch.zeros(3, dtype=torch.int64), ok[:, None], process_weight=0.0)
    assert found.flatten().tolist() == pytest.approx([1.154701, -0.577350, -0.577350], abs=1e-5)
