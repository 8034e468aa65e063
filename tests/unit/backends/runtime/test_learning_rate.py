"""From a schedule's configuration to the learning-rate factor of an update."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import pytest

from posttrain.backends.torch_training.rates import Rates, learning_rate_factor, weight_decay_at
from posttrain.backends.torch_training.update_count import UpdateCount
from posttrain.config.policy import OptimizerConfig, ScheduleConfig


@pytest.mark.parametrize(
    ("schedule", "update", "factor"),
    [
        ({"name": "constant", "warmup_ratio": 0.2}, 1, 0.5),  # 0.2 * 10 = 2 updates of warm-up: 1 / 2
        ({"name": "constant", "warmup_updates": 4, "warmup_ratio": 0.2}, 1, 0.25),  # updates win over the ratio: 1 / 4
        ({"name": "cosine", "warmup_updates": 2}, 6, 0.5),  # half way from 2 to 10: (1 + cos(pi / 2)) / 2
        ({"name": "linear", "warmup_updates": 2, "min_lr_ratio": 0.1}, 6, 0.55),  # 1 - 0.9 * 4 / 8
        ({"name": "warmup_stable_decay", "stable_ratio": 0.5}, 4, 1.0),  # 5 updates at the peak
        (
            {"name": "warmup_stable_decay", "stable_ratio": 0.5, "min_lr_ratio": 0.2},
            10,
            0.2,
        ),  # the floor from the end on
        ({"name": "inverse_square_root", "warmup_updates": 4}, 16, 0.5),  # sqrt(4 / 16)
        ({"name": "inverse_square_root", "warmup_updates": 4, "min_lr_ratio": 0.7}, 9, 0.7),  # sqrt(4 / 9) = 0.667
        ({"name": "inverse_square_root", "warmup_updates": 4, "min_lr_ratio": 0.1}, 11, 0.1),  # after the end
        ({"name": "inverse_square_root", "timescale_updates": 10_000}, 100, 0.9950372),  # sqrt(10000 / 10100)
        # as with a timescale of the warm-up's 4 updates: sqrt(4 / (4 + 16 - 4))
        ({"name": "inverse_square_root", "warmup_updates": 4, "timescale_updates": 4}, 16, 0.5),
        # warm-up from 0.2: 0.2 + 0.8 * 1 / 4
        ({"name": "linear", "warmup_updates": 4, "warmup_start_ratio": 0.2}, 1, 0.4),
        ({"name": "constant", "warmup_updates": 4, "warmup_start_ratio": 0.2}, 0, 0.2),
        ({"name": "cosine", "cycles": 1.5}, 10, 0.0),  # (1 + cos(3 pi)) / 2
        ({"name": "cosine", "cycles": 1.0}, 5, 0.0),  # (1 + cos(pi)) / 2
        ({"name": "cosine", "cycles": 1.0, "min_lr_ratio": 0.2}, 30, 1.0),  # a whole wave ends where it began
        ({"name": "linear", "decay_updates": 5}, 4, 0.2),  # 1 - 4 / 5
        ({"name": "linear", "decay_updates": 5, "min_lr_ratio": 0.3}, 8, 0.3),  # the floor from update 5 on
        # 5 at the peak, then 5 of decay, 3 of which are done: y = 0.6
        ({"name": "warmup_stable_decay", "stable_ratio": 0.5, "decay": "linear"}, 8, 0.4),
        ({"name": "warmup_stable_decay", "stable_ratio": 0.5, "decay": "exponential"}, 8, 0.3195079),  # 2 * 0.5^0.6 - 1
        ({"name": "warmup_stable_decay", "stable_ratio": 0.5, "decay": "minus_sqrt"}, 8, 0.2254033),  # 1 - sqrt(0.6)
        (
            {"name": "warmup_stable_decay", "stable_ratio": 0.5, "decay": "cosine"},
            8,
            0.3454915,
        ),  # (1 + cos(0.6 pi)) / 2
        ({"name": "warmup_stable_decay", "stable_ratio": 0.5, "decay": "constant"}, 12, 1.0),
        # counted from 1: the first update of a warm-up over 4 has 1 / 4
        ({"name": "constant", "warmup_updates": 4, "counts_from": 1}, 0, 0.25),
        ({"name": "linear", "counts_from": 1}, 4, 0.5),
        # 0.1 + 0.9 * 0.4
        ({"name": "warmup_stable_decay", "stable_ratio": 0.5, "decay": "linear", "min_lr_ratio": 0.1}, 8, 0.46),
    ],
)
def test_schedule_gets_its_settings(schedule: dict[str, Any], update: int, factor: float) -> None:
    assert learning_rate_factor(ScheduleConfig(**schedule), total_updates=10)(update) == pytest.approx(factor)


@pytest.mark.parametrize(
    ("rounding", "total", "warmup"),
    [("down", 25, 2), ("up", 25, 3), ("up", 30, 3), ("down", 9, 0), ("up", 9, 1)],
)
def test_a_share_of_the_run_is_rounded_as_asked(rounding: str, total: int, warmup: int) -> None:
    """0.1 x 25 = 2.5 updates: 2 or 3. transformers takes math.ceil, as ROLL does with it; verl int."""
    factor = learning_rate_factor(ScheduleConfig(warmup_ratio=0.1, warmup_rounding=rounding), total_updates=total)
    assert [factor(update) for update in range(4)] == [
        min(1.0, t / max(1, warmup)) if warmup else 1.0 for t in range(4)
    ]


def verls(iteration: int, total: int, ratio: float) -> float:
    """verl's cosine with warm-up, by iteration: int(ratio x total) of them warm up."""
    warmup = int(ratio * total)
    if iteration < warmup:
        return iteration / warmup
    return 0.5 * (1 + math.cos(math.pi * (iteration - warmup) / (total - warmup)))


@pytest.mark.parametrize("updates_per_step", [1, 3, 4])
def test_a_rate_that_moves_every_step_is_verls_update_for_update(updates_per_step: int) -> None:
    """15 iterations, 0.1 of them warm up: 1 iteration, not int(0.1 x 60) = 6 of 60 updates."""
    schedule = ScheduleConfig(name="cosine", warmup_ratio=0.1, moves_every="step")
    factor = learning_rate_factor(schedule, 15 * updates_per_step, updates_per_step)
    expected = [verls(iteration, 15, 0.1) for iteration in range(15) for _ in range(updates_per_step)]
    assert [factor(update) for update in range(15 * updates_per_step)] == pytest.approx(expected)


def test_warmup_and_decay_in_updates_are_whole_steps_where_the_rate_moves_every_step() -> None:
    schedule = ScheduleConfig(name="linear", warmup_updates=4, decay_updates=12, moves_every="step")
    factor = learning_rate_factor(schedule, 40, 2)  # 2 steps of warm-up, the floor at step 6
    course = [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert [factor(update) for update in range(16)] == [rate for rate in course for _ in range(2)]


@pytest.mark.parametrize("total", [5, 6, 10, 22, 59])
def test_a_decay_of_so_many_updates_has_so_many(total: int) -> None:
    """Megatron counts its updates, lr_wsd_decay_steps; a share of the others says the same."""
    for decay in range(1, total + 1):
        schedule = ScheduleConfig(name="warmup_stable_decay", stable_ratio=1 - decay / total, decay="linear")
        factor = learning_rate_factor(schedule, total)
        course = [min(1.0, (total - update) / decay) for update in range(total + 1)]
        assert [factor(update) for update in range(total + 1)] == pytest.approx(course)


@pytest.mark.parametrize("decay", ["cosine", "linear", "exponential", "minus_sqrt"])
def test_every_decay_falls_from_the_peak_to_the_floor(decay: str) -> None:
    factor = learning_rate_factor(
        ScheduleConfig(name="warmup_stable_decay", stable_ratio=0.0, decay=decay, min_lr_ratio=0.1), total_updates=8
    )
    course = [factor(update) for update in range(12)]
    assert course[0] == 1.0 and course[8:] == pytest.approx([0.1] * 4)
    assert all(later < earlier for earlier, later in pairwise(course[:9]))


@pytest.mark.parametrize(
    ("changes", "update", "expected"),
    [
        ({}, 7, 0.1),
        ({"weight_decay_end": 0.3}, 0, 0.1),
        ({"weight_decay_end": 0.3}, 2, 0.15),  # 0.1 + 0.2 * 2 / 8
        ({"weight_decay_end": 0.0}, 4, 0.05),
        ({"weight_decay_end": 0.3, "weight_decay_shape": "cosine"}, 2, 0.1292893),  # 0.1 + 0.2 * (1 - cos(pi / 4)) / 2
        ({"weight_decay_end": 0.3, "weight_decay_shape": "cosine"}, 8, 0.3),
        ({"weight_decay_end": 0.3}, 20, 0.3),
    ],
)
def test_weight_decay_moves_to_its_end(changes: dict[str, Any], update: int, expected: float) -> None:
    found = weight_decay_at(OptimizerConfig(weight_decay=0.1, **changes), total_updates=8)(update)
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_schedule_is_taken_from_the_checkpoint_on_request() -> None:
    saved = Rates(OptimizerConfig(lr=1e-3, weight_decay=0.1), ScheduleConfig(name="linear"), 10, 1).saved()
    other = {"name": "linear", "moves_every": "step"}
    for from_checkpoint in (False, True):
        schedule = ScheduleConfig(**other, from_checkpoint=from_checkpoint)
        rates = Rates(OptimizerConfig(lr=2e-3, weight_decay=0.3), schedule, 40, 2)
        rates.restore(saved)
        # update 5 of 10 at a peak of 1e-3; or step 2 of 20 at 2e-3
        assert 2e-3 * rates.factor(5) == pytest.approx(1e-3 * 0.5 if from_checkpoint else 2e-3 * 0.9)
        assert rates.weight_decay(3) == pytest.approx(0.1 if from_checkpoint else 0.3)
        assert rates.updates_per_move == (None if from_checkpoint else 2)
        rates.restore(None)  # a checkpoint of an earlier version changes nothing
        assert rates.weight_decay(3) == pytest.approx(0.1 if from_checkpoint else 0.3)
    assert json.loads(json.dumps(saved)) == saved


def test_the_count_of_a_resumed_run_follows_the_schedule_of_its_checkpoint() -> None:
    by_step = ScheduleConfig(name="linear", moves_every="step")
    begun = UpdateCount(2, Rates(OptimizerConfig(), by_step, 10, 2), made=3, steps=2)
    resumed = UpdateCount(None, Rates(OptimizerConfig(), ScheduleConfig(from_checkpoint=True), 10, 2))
    resumed.restore(begun.saved())
    assert (resumed.place, resumed.steps, resumed.updates_per_step) == (begun.place, 2, 2)
