"""The best, the worst and the majority of several answers, by hand."""

from __future__ import annotations

import pytest

from posttrain.algos.statistics import reduced_by_name
from posttrain.algos.validation import (
    best_of,
    bootstrap_intervals,
    majority_of,
    majority_value,
    mean_over_prompts,
    pass_at,
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


def test_statistics_of_answers_some_of_which_have_no_value() -> None:
    found = sample_statistics([0.0, 1.0], samples=4)
    assert found["mean@4"] == 0.5
    assert found["best@4/mean"] == pytest.approx(1 - 0.5**4)  # four draws of two values


def test_pass_at_k_draws_without_replacement() -> None:
    assert pass_at(0, 5, 3) == 0.0
    assert pass_at(1, 5, 1) == pytest.approx(0.2)
    assert pass_at(2, 5, 3) == pytest.approx(0.9)  # 1 - C(3,3) / C(5,3) = 1 - 1/10
    assert pass_at(3, 5, 3) == 1.0  # only two are wrong
    assert pass_at(1, 100, 10) == pytest.approx(0.1)
    for right, samples, size in ((1, 2, 3), (3, 2, 1), (-1, 2, 1), (1, 2, 0)):
        with pytest.raises(ValueError, match="pass@"):
            pass_at(right, samples, size)


def test_pass_at_k_is_unbiased() -> None:
    """Its mean over all 2^4 outcomes of 4 answers that are right with probability p is 1 - (1 - p)^2."""
    for p in (0.1, 0.5):
        mean = sum(
            p ** bin(outcome).count("1")
            * (1 - p) ** (4 - bin(outcome).count("1"))
            * pass_at(bin(outcome).count("1"), 4, 2)
            for outcome in range(16)
        )
        assert mean == pytest.approx(1 - (1 - p) ** 2)


def test_bootstrap_intervals() -> None:
    """100 prompts, half of them worth 1: the mean of 100 draws has a standard deviation of 0.05, so 95 % lie within 0.098."""
    prompts = [
        {"a": float(number % 2), **({"b": 2.0} if number < 3 else {}), **({"c": 1.0} if not number else {})}
        for number in range(100)
    ]
    found = bootstrap_intervals(prompts, draws=1000, confidence=0.95, seed=1)
    assert found["a"] == pytest.approx((0.402, 0.598), abs=0.015)
    assert found["b"] == (2.0, 2.0)  # draws without any of the three do not count
    assert "c" not in found  # one prompt tells nothing about the others
    assert bootstrap_intervals(prompts, draws=1000, confidence=0.95, seed=1) == found
    many = bootstrap_intervals(prompts, draws=100_000, confidence=0.95, seed=1)  # in three parts of at most 40,000
    assert many["a"] == (0.4, 0.6) and many["b"] == (2.0, 2.0)
    narrower = bootstrap_intervals(prompts, draws=1000, confidence=0.5, seed=1)["a"]
    assert narrower == pytest.approx((0.466, 0.534), abs=0.015)  # 0.6745 x 0.05
    assert bootstrap_intervals(prompts, draws=0, confidence=0.95, seed=1) == {}
    assert bootstrap_intervals([], draws=10, confidence=0.95, seed=1) == {}


def test_measurements_are_reduced_by_the_name_of_the_metric() -> None:
    assert reduced_by_name({"gap/max": [1.0, 3.0], "reward/min": [1.0, 3.0], "minutes": [1.0, 3.0]}) == {
        "gap/max": 3.0,
        "reward/min": 1.0,
        "minutes": 2.0,
    }
