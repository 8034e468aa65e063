"""PF-PPO's second draw of a step: probabilities by hand, whole trajectories, and records of the whole step."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from batches import sequence_batch, train_batch
from posttrain.algos.resampling import draw_weights
from posttrain.records.batches import TrainBatch
from posttrain.records.plans import LossPlan, ResamplingPlan, UpdatePlan
from posttrain.records.statistics import UpdateStats
from posttrain.steps.mini_batches import rows_per_update
from posttrain.steps.resample import resample, stats_of_all

LOSS = LossPlan(name="ppo_clip", aggregation="token_mean", temperature=1.0)
ALL = torch.ones(3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("scores", "weights", "exponent", "expected"),
    [
        ([0.0, 1.0, -2.0], "power", 2.0, [0.0, 1.0, 4.0]),
        ([0.0, 1.0, -4.0], "power", 0.5, [0.0, 1.0, 2.0]),
        ([0.0, 1.0, -2.0], "extremes", 2.0, [0.0, 1.0, 1.0]),
        ([1.0, 1.0, 0.5], "best", 2.0, [0.4, 0.4, 0.1]),
    ],
)
def test_probabilities_by_hand(scores: list[float], weights: str, exponent: float, expected: list[float]) -> None:
    found = draw_weights(torch.tensor(scores), ALL, weights=weights, exponent=exponent)
    assert found.tolist() == pytest.approx([value + 1e-8 for value in expected], abs=1e-12)


def test_a_response_without_a_score_is_neither_drawn_nor_an_extreme() -> None:
    valid = torch.tensor([True, True, False])
    found = draw_weights(torch.tensor([1.0, 2.0, torch.nan]), valid, weights="extremes", exponent=2.0)
    assert found.tolist() == pytest.approx([1.0, 1.0, 0.0], abs=1e-7)


def steps_of(scores: list[float], trajectories: list[int]) -> TrainBatch:
    """A row per entry, whose old log-prob is minus its number."""
    rows = len(scores)
    sequences = sequence_batch(
        tokens=torch.zeros(rows, 2, dtype=torch.int64),
        prompt_lengths=torch.ones(rows, dtype=torch.int64),
        response_mask=torch.ones(rows, 1, dtype=torch.bool),
        trajectory_index=torch.tensor(trajectories),
        sample_ids=tuple("abcdefgh"[:rows]),
    )
    return train_batch(sequences, scores=torch.tensor(scores), old=-torch.arange(float(rows))[:, None])


def test_rows_of_a_trajectory_are_drawn_together_and_a_repeated_one_counts_twice() -> None:
    """Only the trajectory of rows b and c has a score: it is drawn three times, and each time it is a trajectory."""
    train = steps_of([0.0, 5.0, 5.0, 0.0], [0, 1, 1, 2])
    drawn = resample(train, torch.ones(4, dtype=torch.bool), ResamplingPlan(weights="power"), seed=1)
    assert drawn.sequences.sample_ids == tuple("bcbcbc")
    assert drawn.logprobs.old is not None and drawn.logprobs.old.flatten().tolist() == [-1.0, -2.0] * 3
    plan = UpdatePlan(loss=LOSS, epochs=1, sequences_per_update=2, on_policy=False)
    assert rows_per_update(drawn, plan) == [[0, 1, 2, 3], [4, 5]]


def test_shares_of_many_draws_follow_the_scores() -> None:
    """|1|^2 : |3|^2 is 1 : 9."""
    train = steps_of([1.0, 3.0], [0, 1])
    plan, valid = ResamplingPlan(weights="power"), torch.ones(2, dtype=torch.bool)
    drawn = Counter(one for seed in range(500) for one in resample(train, valid, plan, seed).sequences.sample_ids)
    assert drawn["b"] / drawn.total() == pytest.approx(0.9, abs=0.03)
    again = [resample(train, valid, plan, 7).sequences.sample_ids for _ in range(2)]
    assert again[0] == again[1]


def test_records_are_of_the_whole_step() -> None:
    train = steps_of([0.0, 5.0, 0.0, 0.0], [0, 1, 2, 3])
    stats = UpdateStats(metrics={"policy/loss": 1.0}, trainer_logprobs=torch.zeros(4, 1), updates=1, skipped_updates=0)
    drawn = resample(train, torch.ones(4, dtype=torch.bool), ResamplingPlan(weights="power"), seed=1)
    kept = stats_of_all(stats, train, drawn)
    assert kept.trainer_logprobs is train.logprobs.old
    assert kept.metrics == {"policy/loss": 1.0, "policy/drawn_share": 0.25}
    assert resample(train, torch.zeros(4, dtype=torch.bool), ResamplingPlan(weights="power"), seed=1) is train
    assert stats_of_all(stats, train, train) is stats
