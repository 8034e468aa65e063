"""From a schedule's configuration to the learning-rate factor of an update."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.backends.runtime.inprocess import learning_rate_factor
from posttrain.config.policy import ScheduleConfig


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
    ],
)
def test_schedule_gets_its_settings(schedule: dict[str, Any], update: int, factor: float) -> None:
    assert learning_rate_factor(ScheduleConfig(**schedule), total_updates=10)(update) == pytest.approx(factor)
