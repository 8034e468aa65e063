"""Estimators that compare the responses to a prompt, by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.errors import RequestError
from posttrain.registry import ADVANTAGES


def estimate(
    name: str,
    rewards: Sequence[float],
    groups: Sequence[int],
    lengths: Sequence[int] | None = None,
    valid: Sequence[bool] | None = None,
    **given: Any,
) -> list[float]:
    """The advantage of each response's first token, after checking that its other tokens have the same."""
    lengths = lengths or [1] * len(rewards)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ok = torch.tensor(valid) if valid else torch.ones(len(rewards), dtype=torch.bool)
    result: Tensor = ADVANTAGES.get(name)(torch.tensor(rewards), ok, torch.tensor(groups), mask, **given)
    assert result.dtype == torch.float32
    assert torch.equal(result, torch.where(mask, result[:, :1], 0.0))
    return [float(value) for value in result[:, 0]]


def test_grpo_is_reward_minus_mean_over_sample_std() -> None:
    # mean of 1, 0, 0 = 1/3; squared deviations 4/9 + 1/9 + 1/9 = 6/9, over n - 1 = 2: 1/3; std = 0.57735
    # (1 - 1/3) / 0.57735 = 1.1547; (0 - 1/3) / 0.57735 = -0.57735
    assert estimate("grpo", [1, 0, 0], [7, 7, 7]) == pytest.approx([1.1547, -0.57735, -0.57735], abs=1e-4)


def test_grpo_without_std_only_subtracts_the_mean() -> None:
    # mean 0.5
    assert estimate("grpo", [1.0, 0.0], [0, 0], normalize_by_std=False) == [0.5, -0.5]


def test_groups_do_not_need_to_stand_together() -> None:
    # group 0: 1, 3 (mean 2); group 1: 10, 20 (mean 15)
    advantages = estimate("grpo", [1.0, 10.0, 3.0, 20.0], [0, 1, 0, 1], normalize_by_std=False)
    assert advantages == [-1.0, -5.0, 1.0, 5.0]


def test_an_invalid_response_is_in_neither_mean_nor_gradient() -> None:
    # the mean of the valid ones is (1 + 3) / 2 = 2; NaN stands where there is no reward
    advantages = estimate("grpo", [1.0, math.nan, 3.0], [0, 0, 0], valid=[True, False, True], normalize_by_std=False)
    assert advantages == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "maxrl", "reinforce_plus_plus_baseline"])
def test_a_lone_response_gets_nothing_or_its_reward(name: str) -> None:
    assert estimate(name, [3.0], [0]) == [0.0]
    assert estimate(name, [3.0], [0], lone_sample_keeps_reward=True) == [3.0]


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    # 3 - (1 + 2) / 2 = 1.5; 1 - (3 + 2) / 2 = -1.5; 2 - (3 + 1) / 2 = 0
    assert estimate("rloo", [3.0, 1.0, 2.0], [0, 0, 0]) == pytest.approx([1.5, -1.5, 0.0])


def test_opo_weighs_the_baseline_by_length() -> None:
    # lengths 3 and 1: (3 x 1 + 1 x 0) / 4 = 0.75
    assert estimate("opo", [1.0, 0.0], [0, 0], lengths=[3, 1]) == pytest.approx([0.25, -0.75])


def test_gpg_scales_by_the_responses_without_signal() -> None:
    # 4 responses, 1 of them not 0: scale 4; group 0: mean 0.5 -> 4 x 0.5 = 2; group 1 is all 0
    assert estimate("gpg", [1.0, 0.0, 0.0, 0.0], [0, 0, 1, 1]) == [2.0, -2.0, 0.0, 0.0]


def test_gpg_counts_only_valid_responses() -> None:
    # 2 valid, 1 of them not 0: scale 2
    assert estimate("gpg", [1.0, 0.0, 5.0], [0, 0, 0], valid=[True, True, False]) == [1.0, -1.0, 0.0]


def test_maxrl_divides_by_the_mean() -> None:
    # mean 0.25: (1 - 0.25) / 0.25 = 3; -0.25 / 0.25 = -1
    assert estimate("maxrl", [1.0, 0.0, 0.0, 0.0], [0] * 4) == pytest.approx([3.0, -1.0, -1.0, -1.0], rel=1e-5)


def test_grpo_passk_rewards_the_leader_by_its_lead() -> None:
    # lead 3 - 2 = 1; mean 2, squared deviations 1 + 0 + 1 over 2 = 1: std 1
    assert estimate("grpo_passk", [1.0, 3.0, 2.0], [0, 0, 0]) == pytest.approx([0.0, 1.0, 0.0], abs=1e-5)
    assert estimate("grpo_passk", [1.0, 5.0, 2.0], [0, 0, 0], normalize_by_std=False) == [0.0, 3.0, 0.0]


def test_grpo_passk_gives_nothing_when_two_lead_or_one_is_alone() -> None:
    assert estimate("grpo_passk", [3.0, 3.0, 1.0, 9.0], [0, 0, 0, 1]) == [0.0] * 4


def test_reinforce_plus_plus_baseline_scales_over_all_tokens() -> None:
    # centred: 1, -1, on 3 + 1 tokens: mean (3 - 1) / 4 = 0.5; squared deviations 3 x 0.25 + 2.25 = 3, over 3 = 1
    advantages = estimate("reinforce_plus_plus_baseline", [2.0, 0.0], [0, 0], lengths=[3, 1])
    assert advantages == pytest.approx([0.5, -1.5], abs=1e-6)


def test_gdpo_standardises_every_term_before_it_sums() -> None:
    # accuracy 1, 0 and length 100, 300: each is +-1 / sqrt(2) = +-0.7071 in its group of two; weights 1 and 0.5:
    # 0.7071 - 0.3536 = 0.3536 and -0.3536; whitened over two tokens: std 0.5, so +-0.7071
    assert gdpo(term_weights=[1.0, 0.5]) == pytest.approx([0.7071, -0.7071], abs=1e-4)
    assert gdpo(terms=["length", "accuracy"], term_weights=[0.5, 1.0]) == pytest.approx([0.7071, -0.7071], abs=1e-4)
    assert gdpo() == gdpo(terms=["accuracy", "length"])  # what is beside a score (length/tokens) is no term
    assert gdpo(terms=["length/tokens"]) == pytest.approx([0.7071, -0.7071], abs=1e-4)


def gdpo(rows: int = 2, **given: object) -> list[float]:
    terms = {
        "accuracy": torch.tensor([1.0, 0.0, math.nan]),
        "length": torch.tensor([100.0, 300.0, 900.0]),
        "length/tokens": torch.tensor([7.0, 5.0, 5.0]),
    }
    return (
        ADVANTAGES.get("gdpo")(
            {name: scores[:rows] for name, scores in terms.items()},
            torch.ones(rows, dtype=torch.bool),
            torch.zeros(rows, dtype=torch.int64),
            torch.ones(rows, 1, dtype=torch.bool),
            **given,
        )
        .flatten()
        .tolist()
    )


def test_gdpo_compares_a_term_among_the_responses_that_have_it() -> None:
    # 1, 0, absent: +-0.7071 and 0 for the third; whitened over three: sample std 0.7071, so +-1
    assert gdpo(rows=3, terms=["accuracy"]) == pytest.approx([1.0, -1.0, 0.0], abs=1e-5)


def test_gdpo_goes_on_without_a_term_that_no_response_of_the_step_has() -> None:
    """Its prompts are not in this step: the others' weights stay theirs."""
    assert gdpo(terms=["style", "accuracy"], term_weights=[9.0, 1.0]) == gdpo(terms=["accuracy"])


def test_gdpo_says_which_term_nobody_scored_and_how_many_weights_it_has() -> None:
    with pytest.raises(RequestError, match="no response of this step has a reward term length/words"):
        gdpo(terms=["length/words"])
    with pytest.raises(RequestError, match="has 3 numbers for 2 terms"):
        gdpo(term_weights=[1.0, 2.0, 3.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "maxrl", "grpo_passk", "reinforce_plus_plus_baseline"])
def test_equal_rewards_give_exactly_zero(name: str, dtype: torch.dtype) -> None:
    # in float32 the mean of eight 0.9 is not 0.9, in float64 that of six 0.7, so a plain (r - mean) / (std + 1e-6) is not 0
    rewards = torch.full((14,), 0.9, dtype=dtype)
    rewards[8:] = 0.7
    groups = torch.tensor([0] * 8 + [1] * 6)
    mask = torch.arange(5) < torch.arange(14)[:, None] % 5 + 1
    advantages = ADVANTAGES.get(name)(rewards, torch.ones(14, dtype=torch.bool), groups, mask)
    assert (advantages == 0).all()


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "maxrl", "grpo_passk", "reinforce_plus_plus_baseline"])
def test_nothing_valid_or_nothing_sampled_gives_zero(name: str) -> None:
    rewards, groups = torch.tensor([1.0, 2.0]), torch.tensor([0, 0])
    full, empty = torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.bool)
    estimator = ADVANTAGES.get(name)
    assert (estimator(rewards, empty[:, 0], groups, full) == 0).all()
    assert (estimator(rewards, full[:, 0], groups, empty) == 0).all()


def test_sppo_compares_with_the_soft_mean_of_the_step() -> None:
    sppo = ADVANTAGES.get("sppo")
    mask, all_valid = torch.ones(3, 2).bool(), torch.ones(3).bool()
    rewards = torch.tensor([0.0, math.log(4), math.log(4)])
    # scale 1: log((1 + 4 + 4) / 3) = log 3; scale 0.5: log((1 + 2 + 2) / 3) / 0.5 = 1.021651; scale 0: 2 / 3 log 4 = 0.924196
    for scale, mean in ((1.0, math.log(3)), (0.5, 1.021651), (0.0, 0.924196)):
        found = sppo(rewards, all_valid, mask, soft_mean_scale=scale)
        assert found[:, 0].tolist() == pytest.approx([-mean, math.log(4) - mean, math.log(4) - mean], abs=1e-6)
    # 0 and log 4 with scale 1: log(5 / 2); the reward that is not there is in no mean
    found = sppo(torch.tensor([0.0, math.nan, math.log(4)]), torch.tensor([True, False, True]), mask)
    assert found[:, 1].tolist() == pytest.approx([-math.log(2.5), 0.0, math.log(1.6)], abs=1e-6)
    assert not sppo(torch.full((3,), 0.9), all_valid, mask).any()
    # large rewards do not overflow: 1000 + log(1 / 3)
    assert sppo(torch.tensor([0.0, 0.0, 1000.0]), all_valid, mask)[2, 0] == pytest.approx(math.log(3), abs=1e-4)


def test_online_dpo_weighs_pairs_by_how_far_the_policy_is_from_their_order() -> None:
    online_dpo = ADVANTAGES.get("online_dpo")
    mask, all_valid = torch.tensor([[True, True], [True, False], [True, True], [True, True]]), torch.ones(4).bool()
    old, ref = torch.full((4, 2), -1.0), torch.full((4, 2), -1.0)
    old[1, 0] += math.log(3)  # the second of the first pair, whose reward is lower: h = 0 - log 3
    old[1, 1] = math.nan  # masked: never read
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.4])
    # beta 1: sigma(log 3) = 3/4, and sigma(0) = 1/2 where h = 0; 4 rows for 2 pairs: twice that
    found = online_dpo(rewards, all_valid, mask, old, ref, beta=1.0)
    expected = [[1.5, 1.5], [-1.5, 0.0], [1.0, 1.0], [-1.0, -1.0]]
    assert found.dtype == torch.float32 and torch.allclose(found, torch.tensor(expected))
    # ipo, beta 1/2: the target is 1; 2 (1 + log 3) and 2, twice
    found = online_dpo(rewards, all_valid, mask, old, ref, beta=0.5, pair_loss="ipo")
    assert found[:, 0].tolist() == pytest.approx([4 + 4 * math.log(3), -4 - 4 * math.log(3), 4, -4], abs=1e-5)
    # a pair of which one row is not valid teaches nothing; 3 valid rows for the one pair that is left
    found = online_dpo(rewards, torch.tensor([True, False, True, True]), mask, old, ref, beta=1.0)
    assert found[:, 0].tolist() == pytest.approx([0, 0, 1.5, -1.5])
    # equal rewards: nothing, and 4 rows for the other pair; or the first one wins
    rewards[3] = 0.5
    found = online_dpo(rewards, all_valid, mask, old, ref, beta=1.0)
    assert found[:, 0].tolist() == pytest.approx([3, -3, 0, 0])
    found = online_dpo(rewards, all_valid, mask, old, ref, beta=1.0, equal_rewards="first")
    assert found[:, 0].tolist() == pytest.approx([1.5, -1.5, 1, -1])


@pytest.mark.parametrize("settings", [{}, {"label_smoothing": 0.2}, {"pair_loss": "ipo", "beta": 0.7}])
def test_online_dpo_has_the_gradient_of_dpo(settings: dict[str, Any]) -> None:
    """-A log pi, summed over all rows / their number, against autograd of the loss as the paper writes it."""
    torch.manual_seed(0)
    policy, ref = -torch.rand(6, 5, dtype=torch.float64), -torch.rand(6, 5, dtype=torch.float64)
    mask = torch.arange(5) < torch.tensor([5, 2, 3, 3, 1, 4])[:, None]
    rewards, beta, smoothing = (
        torch.tensor([0.0, 1, 1, 0, 3, 2]),
        settings.get("beta", 0.1),
        settings.get("label_smoothing", 0),
    )
    advantages = ADVANTAGES.get("online_dpo")(rewards, torch.ones(6).bool(), mask, policy, ref, **settings)
    policy.requires_grad_()
    gaps = torch.where(mask, policy - ref, 0.0).sum(1)
    h = torch.stack([gaps[1] - gaps[0], gaps[2] - gaps[3], gaps[4] - gaps[5]])
    right, wrong = torch.sigmoid(beta * h).log(), torch.sigmoid(-beta * h).log()
    losses = (h - 1 / (2 * beta)) ** 2 if "pair_loss" in settings else -(1 - smoothing) * right - smoothing * wrong
    (expected,) = torch.autograd.grad(losses.mean(), policy)
    assert torch.allclose(-advantages.double() / 6, expected, rtol=1e-5, atol=1e-9)
