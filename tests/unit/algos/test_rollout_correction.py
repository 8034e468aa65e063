"""Corrections for the sampler's log-probs, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.algos.rollout_correction import importance_weights, rejection_mask

# pi_old / pi_rollout: 2, 0.5, (masked) in the first row, 4, 1.5, 1 in the second, nothing in the third
RATIOS = torch.tensor([[2.0, 0.5, math.nan], [4.0, 1.5, 1.0], [math.nan, math.nan, math.nan]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
OLD, ROLLOUT = RATIOS.log() - 3, torch.full((3, 3), -3.0, dtype=torch.float64)


def weights(**given: object) -> list[list[float]]:
    return importance_weights(OLD, ROLLOUT, MASK, **given).tolist()  # type: ignore[arg-type]


def rows(*expected: list[float]) -> list[list[float]]:
    return [pytest.approx(row) for row in expected]


def test_token_weights_are_cut_from_above() -> None:
    assert weights(level="token", high=3.0) == rows([2, 0.5, 0], [3, 1.5, 1], [0, 0, 0])


def test_with_a_lower_bound_what_lies_outside_weighs_nothing() -> None:
    assert weights(level="token", low=0.6, high=3.0) == rows([2, 0, 0], [0, 1.5, 1], [0, 0, 0])


def test_sequence_weights_are_products() -> None:
    # 2 x 0.5 = 1; 4 x 1.5 x 1 = 6, cut to 5
    assert weights(level="sequence", high=5.0) == rows([1, 1, 0], [5, 5, 5], [0, 0, 0])


def test_mean_weights_are_geometric() -> None:
    # sqrt(2 x 0.5) = 1; (4 x 1.5 x 1) ** (1/3) = 1.8171
    assert weights(level="sequence_mean", high=5.0) == rows([1, 1, 0], [1.81712] * 3, [0, 0, 0])


def test_weights_of_turns_are_means_between_breaks() -> None:
    ratios = torch.tensor([[4.0, 1.0, math.nan, 9.0, 1.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False, True, True]])
    found = importance_weights(ratios.log(), torch.zeros(1, 5).double(), mask, level="turn", high=2.5)
    assert found.tolist() == rows([2, 2, 0, 2.5, 2.5])  # sqrt(4 x 1), and sqrt(9 x 1) = 3, cut


def test_differences_of_probabilities_have_two_bounds() -> None:
    # trainer 0.5, 0.9, -, 0.3 and sampler 0.3, 0.3, -, 0.4: differences 0.2, 0.6 | -0.1; mean of the first turn 0.4
    old = torch.tensor([[0.5, 0.9, math.nan, 0.3]], dtype=torch.float64).log()
    sampled = torch.tensor([[0.3, 0.3, math.nan, 0.4]], dtype=torch.float64).log()
    mask = torch.tensor([[True, True, False, True]])

    def kept(reduction: str, **limits: float) -> list[int]:
        found = rejection_mask(old, sampled, mask, statistic="difference", reduction=reduction, **limits)
        return found[0].int().tolist()

    assert kept("token", low=-0.05, high=0.5) == [1, 0, 0, 0]
    assert kept("token", high=0.5) == [1, 0, 0, 1]
    assert kept("turn_mean", low=-0.2, high=0.3) == [0, 0, 0, 1]
    assert kept("sequence_mean", high=0.3) == [1, 1, 0, 1]  # 0.7 / 3 = 0.233
    assert kept("sequence_sum", high=0.6) == [0, 0, 0, 0]  # 0.7


def test_normalised_weights_have_mean_one() -> None:
    # tokens: (2 + 0.5 + 4 + 1.5 + 1) / 5 = 1.8; responses: (1 + 6) / 2 = 3.5, the empty one not counted
    assert weights(level="token", high=9.0, normalize=True)[1] == pytest.approx([4 / 1.8, 1.5 / 1.8, 1 / 1.8])
    assert weights(level="sequence", high=9.0, normalize=True) == rows([1 / 3.5] * 2 + [0], [6 / 3.5] * 3, [0, 0, 0])


def test_nothing_sampled_is_no_nan() -> None:
    nothing = MASK & False
    assert (importance_weights(OLD, ROLLOUT, nothing, level="token", high=2.0, normalize=True) == 0).all()
    assert not rejection_mask(OLD, ROLLOUT, nothing, statistic="k3", reduction="sequence_mean", high=1.0).any()


@pytest.mark.parametrize(
    ("statistic", "reduction", "limits", "kept"),
    [
        # k1 = -ln ratio = -0.693, 0.693 | -1.386, -0.405, 0; bounds ln 1/3 = -1.099 to ln 3
        ("k1", "token", {"high": 3.0}, [[1, 1, 0], [0, 1, 1]]),
        ("k1", "token", {"low": 0.2, "high": 1.5}, [[1, 0, 0], [1, 1, 1]]),  # -1.609 to 0.405
        ("k1", "sequence_max", {"high": 3.0}, [[1, 1, 0], [0, 0, 0]]),
        ("k1", "sequence_sum", {"high": 3.0}, [[1, 1, 0], [0, 0, 0]]),  # 0 | -1.792
        ("k1", "sequence_mean", {"high": 3.0}, [[1, 1, 0], [1, 1, 1]]),  # 0 | -0.597
        ("k2", "token", {"high": 0.5}, [[1, 1, 0], [0, 1, 1]]),  # 0.240, 0.240 | 0.961, 0.082, 0
        ("k2", "sequence_max", {"high": 0.5}, [[1, 1, 0], [0, 0, 0]]),
        ("k3", "sequence_mean", {"high": 0.5}, [[1, 1, 0], [0, 0, 0]]),  # 0.25 | (1.614 + 0.095 + 0) / 3 = 0.569
        ("k3", "sequence_mean", {"high": 0.6}, [[1, 1, 0], [1, 1, 1]]),
    ],
)
def test_rejection(statistic: str, reduction: str, limits: dict[str, float], kept: list[list[int]]) -> None:
    mask = rejection_mask(OLD, ROLLOUT, MASK, statistic=statistic, reduction=reduction, **limits)
    assert mask.long().tolist() == [*kept, [0, 0, 0]]


def test_unknown_names() -> None:
    with pytest.raises(KeyError, match="row"):
        weights(level="row", high=2.0)
    with pytest.raises(KeyError, match="k4"):
        rejection_mask(OLD, ROLLOUT, MASK, statistic="k4", reduction="token", high=1.0)
    with pytest.raises(KeyError, match="row"):
        rejection_mask(OLD, ROLLOUT, MASK, statistic="k1", reduction="row", high=1.0)


@pytest.mark.parametrize(
    ("high", "kept"),
    [
        # Squares of ln 2, ln 0.5, ln 4, ln 1.5, ln 1: 0.48, 0.48, 1.92, 0.164, 0, mean 0.609.
        (0.61, [[1, 1, 0], [1, 1, 1], [0, 0, 0]]),
        # Without 1.92 the mean is 0.281.
        (0.3, [[1, 1, 0], [0, 1, 1], [0, 0, 0]]),
        # Without the first of the equal ones, 0.215; without both, 0.082; without 0.164, 0.
        (0.22, [[0, 1, 0], [0, 1, 1], [0, 0, 0]]),
        (0.1, [[0, 0, 0], [0, 1, 1], [0, 0, 0]]),
        (0.01, [[0, 0, 0], [0, 0, 1], [0, 0, 0]]),
    ],
)
def test_the_second_moment_of_a_step(high: float, kept: list[list[int]]) -> None:
    found = rejection_mask(OLD, ROLLOUT, MASK, statistic="m2", reduction="step", high=high)
    assert found.int().tolist() == kept


def test_the_second_moment_of_nothing() -> None:
    none = torch.zeros_like(MASK)
    assert not rejection_mask(OLD, ROLLOUT, none, statistic="m2", reduction="step", high=0.1).any()
