"""The best, the worst and the majority of several answers, by hand."""

from __future__ import annotations

import pytest

from posttrain.algos.statistics import reduced_by_name
from posttrain.algos.validation import (
    best_of,
    majority_of,
    majority_value,
    mean_over_prompts,
    sample_statistics,
    subset_sizes,
    worst_of,
)


def test_sizes_of_subsets() -> None:
    assert [subset_sizes(samples) for samples in (1, 2, 3, 4, 5, 8, 9)] == [
        [],
        [2],
        [2, 3],
        [2, 4],
        [2, 4, 5],
        [2, 4, 8],
        [2, 4, 8, 9],
    ]


def test_best_and_worst_are_exact() -> None:
    # two of {0, 0.25, 0.5, 1}, with replacement: the largest is these with 1, 3, 5, 7 of 16 draws:
    # (0 + 0.75 + 2.5 + 7) / 16 = 0.640625; squares: (0 + 0.1875 + 1.25 + 7) / 16 - 0.410400 = 0.116943, root 0.341970
    assert best_of([0.5, 0.0, 1.0, 0.25], 2) == pytest.approx((0.640625, 0.341970), abs=1e-6)
    # the smallest with 7, 5, 3, 1: (0 + 1.25 + 1.5 + 1) / 16 = 0.234375
    assert worst_of([0.5, 0.0, 1.0, 0.25], 2)[0] == pytest.approx(0.234375)
    assert best_of([0.7], 3) == (0.7, 0.0)


def test_the_majority() -> None:
    assert majority_value(["a", "b", "b"], [1.0, 0.0, 0.5]) == 0.0
    assert majority_value(["a", "b"], [1.0, 0.0]) == 1.0  # a tie: the first
    # two of a (worth 1) and b (worth 0): aa and ab give 1, ba and bb give 0
    mean, std = majority_of(["a", "b"], [1.0, 0.0], 2)
    assert mean == pytest.approx(0.5, abs=0.05) and std == pytest.approx(0.5, abs=0.01)
    assert majority_of(["a", "b"], [1.0, 0.0], 2) == (mean, std)  # the same draws every time


def test_a_statistic_is_averaged_over_the_prompts_that_have_it() -> None:
    one, two = sample_statistics([1.0]), sample_statistics([0.0, 1.0])
    assert one == {"mean@1": 1.0}
    # best of two draws of {0, 1}: 3/4; worst: 1/4; standard deviations sqrt(3/16) = 0.433013
    assert two == pytest.approx(
        {
            "mean@2": 0.5,
            "std@2": 0.5,
            "best@2/mean": 0.75,
            "best@2/std": 0.433013,
            "worst@2/mean": 0.25,
            "worst@2/std": 0.433013,
        },
        abs=1e-6,
    )
    assert set(sample_statistics([0.0, 1.0], ["x", "y"])) - set(two) == {"maj@2/mean", "maj@2/std"}
    merged = mean_over_prompts([one, two, two | {"mean@2": 1.0}])
    assert merged["mean@1"] == 1.0 and merged["mean@2"] == 0.75


def test_measurements_are_reduced_by_the_name_of_the_metric() -> None:
    assert reduced_by_name({"gap/max": [1.0, 3.0], "reward/min": [1.0, 3.0], "minutes": [1.0, 3.0]}) == {
        "gap/max": 3.0,
        "reward/min": 1.0,
        "minutes": 2.0,
    }
