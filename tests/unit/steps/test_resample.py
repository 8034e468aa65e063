"""The second draw of a step: PF-PPO's probabilities by hand, whole trajectories, rows copied or left out until they divide, and
records of the whole step."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from batches import sequence_batch, train_batch
from posttrain.algos.resampling import draw_weights
from posttrain.config.fitting import Fit, fitted_count
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
    assert kept.metrics == {"policy/loss": 1.0, "policy/drawn_share": 0.25, "policy/added_samples": 0.0}
    assert resample(train, torch.zeros(4, dtype=torch.bool), ResamplingPlan(weights="power"), seed=1) is train
    assert stats_of_all(stats, train, train) is stats


@pytest.mark.parametrize(
    ("samples", "multiple", "copied", "dropped", "nearest", "one"),
    [
        (256, 48, 288, 240, 240, 48),  # 256 = 5 x 48 + 16, and 16 is less than half of 256
        (20, 48, 48, 48, 48, 48),  # nothing would be left
        (96, 48, 96, 96, 96, 96),  # divides
        (7, 5, 10, 5, 5, 5),  # the rest 2 is less than 3.5
        (5, 6, 6, 6, 6, 6),
        (3, 1, 3, 3, 3, 3),
    ],
)
def test_counts_that_divide_by_hand(
    samples: int, multiple: int, copied: int, dropped: int, nearest: int, one: int
) -> None:
    fits: list[Fit] = ["copy", "drop", "nearest", "one", "none"]
    expected = [copied, dropped, nearest, one, samples]
    assert [fitted_count(samples, multiple, fit) for fit in fits] == expected


def fit(train: TrainBatch, how: Fit, multiple: int, seed: int = 3) -> TrainBatch:
    plan = ResamplingPlan(fit=how, multiple_of=multiple)
    return resample(train, torch.ones(len(train), dtype=torch.bool), plan, seed)


def test_copies_come_behind_all_rows_and_none_is_copied_twice_before_all_are() -> None:
    train = steps_of([0.0] * 5, [0, 1, 2, 3, 4])
    names = fit(train, "copy", 4).sequences.sample_ids
    assert names[:5] == tuple("abcde") and len(names) == 8 and len(set(names[5:])) == 3
    many = fit(train, "copy", 16).sequences.sample_ids
    assert len(many) == 16 and set(many) == set("abcde")
    drawn = {one for seed in range(60) for one in fit(train, "copy", 6, seed).sequences.sample_ids[5:]}
    assert drawn == set("abcde")  # every row has its chance


@pytest.mark.parametrize(("how", "left"), [("drop", 4), ("nearest", 4), ("one", 2)])
def test_rows_that_stay_keep_their_order(how: Fit, left: int) -> None:
    train = steps_of([0.0] * 5, [0, 1, 2, 3, 4])
    taken = fit(train, how, 2)
    names = taken.sequences.sample_ids
    assert len(names) == left and list(names) == sorted(names) and set(names) < set("abcde")
    assert fit(train, how, 2).sequences.sample_ids == names
    assert taken.logprobs.old is not None
    assert taken.logprobs.old.flatten().tolist() == [-float("abcde".index(name)) for name in names]


def test_turns_are_rows_of_their_own_once_they_divide() -> None:
    """Two episodes of 3 and 2 turns are copied to 6 rows: 3 updates of 2 rows, not 1 of two episodes."""
    taken = fit(steps_of([0.0] * 5, [0, 0, 0, 1, 1]), "copy", 6)
    plan = UpdatePlan(loss=LOSS, epochs=1, sequences_per_update=2, on_policy=False)
    assert rows_per_update(taken, plan) == [[0, 1], [2, 3], [4, 5]]


def test_records_know_what_was_added_or_left_out() -> None:
    train = steps_of([0.0] * 5, [0, 1, 2, 3, 4])
    stats = UpdateStats(metrics={}, trainer_logprobs=torch.zeros(2, 1), updates=1, skipped_updates=0)
    for how, added, share in (("copy", 3.0, 1.0), ("drop", -1.0, 0.8)):
        kept = stats_of_all(stats, train, fit(train, how, 4))
        assert kept.metrics == {"policy/drawn_share": share, "policy/added_samples": added}
        assert kept.trainer_logprobs is train.logprobs.old
