"""Overlong penalty, group filter and reward normalisation, by hand."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest
import torch

from posttrain.algos.group_filter import passes
from posttrain.algos.overlong import overlong_penalty
from posttrain.algos.reward_normalization import RunningMoments, normalize_rewards

NAN = float("nan")


# ------------------------------------------------------------------------------------------------- overlong penalty


@pytest.mark.parametrize(
    ("tokens", "change"),
    [  # limit 20, buffer 4: free up to 16, then a quarter of the penalty per token
        (1, 0.0),
        (16, 0.0),
        (17, -0.5),  # 1 / 4 x 2
        (18, -1.0),
        (20, -2.0),
    ],
)
def test_overlong_penalty_falls_linearly_over_the_buffer(tokens: int, change: float) -> None:
    assert overlong_penalty(tokens, max_response_tokens=20, buffer_tokens=4, penalty=2.0) == change


# ------------------------------------------------------------------------------------------------------ group filter


@pytest.mark.parametrize(
    ("scores", "samples", "bounds", "expected"),
    [
        ([0.1, 0.1, 0.1], 3, {"above_std": 0.0}, False),  # their rounded mean is not 0.1
        ([0.1, 0.1, 0.2], 3, {"above_std": 0.0}, True),
        ([0.0, 1.0], 2, {"above_std": 0.7}, True),  # sample std sqrt(0.5) = 0.7071; the population's is 0.5
        ([0.0, 1.0], 2, {"above_std": 0.71}, False),
        ([1.0], 1, {"above_std": 0.0}, True),  # sampled alone: nothing could ever pass
        ([1.0], 8, {"above_std": 0.0}, False),  # the other seven had no valid reward
        ([], 8, {}, False),
        ([], 1, {"above_std": 0.0}, False),
        ([1.0, 1.0], 2, {}, True),
        ([0.0, 1.0], 2, {"above_mean": 0.5}, False),  # bounds are exclusive
        ([0.0, 1.0], 2, {"above_mean": 0.4, "below_mean": 0.6}, True),
        ([0.0, 1.0], 2, {"below_mean": 0.5}, False),
        ([0.0, 1.0], 2, {"above_std": 0.0, "below_mean": 0.4}, False),  # every bound counts
    ],
)
def test_group_passes_when_every_bound_is_met(
    scores: list[float], samples: int, bounds: dict[str, float], expected: bool
) -> None:
    assert passes(scores, samples=samples, **bounds) is expected


# ----------------------------------------------------------------------------------------------------- normalisation

REWARDS = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]  # two groups of four: means 3/4 and 0
# Group 1: squared deviations 3 x 1/16 + 9/16 = 3/4, over 3: std 1/2. Batch: mean 3/8, squares 3 x (5/8)^2 + 5 x (3/8)^2
# = 75/64 + 45/64 = 15/8, over 7: std sqrt(15/56) = 0.517549.
BATCH_STD = math.sqrt(15 / 56)


def normalized(
    rewards: list[float], valid: list[bool] | None = None, groups: list[int] | None = None, **how: str
) -> list[float]:
    values = torch.tensor(rewards)
    kept = torch.tensor(valid if valid is not None else [True] * len(rewards))
    index = torch.tensor(groups if groups is not None else [0] * 4 + [1] * 4)
    moments = RunningMoments().with_rewards(values[kept])
    return normalize_rewards(values, kept, index, moments, **{"mean": "none", "std": "none", **how}).tolist()


@pytest.mark.parametrize(
    ("how", "first", "second", "last"),
    [  # of a response with reward 1 and one with reward 0 of the first group, and one of the second group
        ({"mean": "group", "std": "group"}, 0.25 / 0.5, -0.75 / 0.5, 0.0),
        ({"mean": "group", "std": "batch"}, 0.25 / BATCH_STD, -0.75 / BATCH_STD, 0.0),  # 0.483, -1.449
        (
            {"mean": "batch", "std": "batch"},
            0.625 / BATCH_STD,
            -0.375 / BATCH_STD,
            -0.375 / BATCH_STD,
        ),  # 1.2076, -0.7246
        ({"mean": "running", "std": "running"}, 0.625 / BATCH_STD, -0.375 / BATCH_STD, -0.375 / BATCH_STD),  # one step
        (
            {"mean": "batch", "std": "group"},
            0.625 / 0.5,
            -0.375 / 0.5,
            0.0,
        ),  # the second group has no spread: exactly 0
        ({"mean": "none", "std": "group"}, 1 / 0.5, 0.0, 0.0),
        ({"mean": "group"}, 0.25, -0.75, 0.0),
        ({"mean": "batch"}, 0.625, -0.375, -0.375),
    ],
)
def test_mean_and_std_over_group_batch_and_run(how: dict[str, str], first: float, second: float, last: float) -> None:
    result = normalized(REWARDS, **how)
    assert (result[0], result[1], result[7]) == pytest.approx((first, second, last), abs=1e-5)
    if last == 0:
        assert result[4:] == [0.0] * 4


PARTS = ("none", "group", "batch", "running")


@pytest.mark.parametrize("mean", PARTS)
@pytest.mark.parametrize("std", PARTS)
def test_invalid_responses_are_in_no_statistic(mean: str, std: str) -> None:
    """The same with two rows that have no valid reward, whatever stands there, as without them."""
    without = normalized([1.0, 0.0, 2.0, 5.0, 3.0], groups=[0, 0, 0, 1, 1], mean=mean, std=std)
    rewards, groups = [1.0, NAN, 0.0, 2.0, 5.0, 3.0, 1e30], [0, 0, 0, 0, 1, 1, 1]
    valid = [True, False, True, True, True, True, False]
    assert normalized(rewards, valid, groups, mean=mean, std=std) == [
        *without[:1], 0.0, *without[1:], 0.0,
    ]  # fmt: skip


@pytest.mark.parametrize(("mean", "std"), [(m, s) for m in PARTS for s in PARTS if (m, s) != ("none", "none")])
def test_equal_rewards_give_exactly_0(mean: str, std: str) -> None:
    """0.1 has no exact float, so the mean of seven is not 0.1; a division by 1e-6 would show it."""
    result = normalized([0.1] * 7, groups=[0] * 3 + [1] * 4, mean=mean, std=std)
    assert result == [0.0] * 7


@pytest.mark.parametrize("how", [{"mean": "group"}, {"std": "group"}, {"mean": "group", "std": "batch"}])
def test_group_of_one_gets_0(how: dict[str, str]) -> None:
    assert normalized([3.0, 1.0, 2.0], groups=[0, 1, 1], **how)[0] == 0.0


def test_no_valid_reward_at_all() -> None:
    assert normalized([1.0, NAN], [False, False], [0, 0], mean="batch", std="running") == [0.0, 0.0]


def test_running_moments_are_those_of_all_rewards_together() -> None:
    moments = RunningMoments()
    for step in ([1.0, 2.0, 6.0], [], [3.0], [-4.0, 0.5]):
        moments = moments.with_rewards(torch.tensor(step))
    everything = torch.tensor([1.0, 2.0, 6.0, 3.0, -4.0, 0.5], dtype=torch.float64)
    assert moments.count == 6
    assert moments.mean == pytest.approx(everything.mean().item())  # 8.5 / 6
    assert moments.std == pytest.approx(everything.std().item())
    assert RunningMoments(**json.loads(json.dumps(asdict(moments)))) == moments


def test_running_moments_of_equal_rewards_have_exactly_no_spread() -> None:
    moments = RunningMoments()
    for count in (3, 7, 1):
        moments = moments.with_rewards(torch.full((count,), 0.1))
    assert moments.mean == float(torch.tensor(0.1))
    assert (moments.std, RunningMoments().std, RunningMoments(count=1, mean=2.0).std) == (0.0, 0.0, 0.0)
