"""From a schedule's configuration to the learning-rate factor of an update."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from posttrain.backends.torch_training.start import learning_rate_factor, weight_decay_at
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
        # 0.1 + 0.9 * 0.4
        ({"name": "warmup_stable_decay", "stable_ratio": 0.5, "decay": "linear", "min_lr_ratio": 0.1}, 8, 0.46),
    ],
)
def test_schedule_gets_its_settings(schedule: dict[str, Any], update: int, factor: float) -> None:
    assert learning_rate_factor(ScheduleConfig(**schedule), total_updates=10)(update) == pytest.approx(factor)


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
