"""Learning rate and weight decay of a trained model over its updates, from its configuration or from a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any

from posttrain.algos import schedules
from posttrain.config.policy import OptimizerConfig, ScheduleConfig

_DECAY = ("weight_decay", "weight_decay_end", "weight_decay_shape")


class Rates:
    """The schedule of a role. ``saved`` gives plain values for its checkpoint; with schedule.from_checkpoint a resumed run keeps
    the schedule of its checkpoint: peak, shape, length and decay, whatever the configuration says now."""

    def __init__(self, optimizer: OptimizerConfig, schedule: ScheduleConfig, total_updates: int, updates_per_step: int):
        self._lr = optimizer.lr
        self._from_checkpoint = schedule.from_checkpoint
        self._begin(
            {
                "lr": optimizer.lr,
                "decay": {name: getattr(optimizer, name) for name in _DECAY},
                "schedule": schedule.model_dump(exclude={"from_checkpoint"}),
                "total_updates": total_updates,
                "updates_per_step": updates_per_step,
            }
        )

    def _begin(self, settings: Mapping[str, Any]) -> None:
        self._settings = dict(settings)
        schedule = ScheduleConfig(**settings["schedule"])
        total, per_step = settings["total_updates"], settings["updates_per_step"]
        self._factor = learning_rate_factor(schedule, total, per_step)
        self._weight_decay = weight_decay_at(OptimizerConfig(**settings["decay"]), total)
        self.updates_per_move = updates_per_move(schedule, per_step)

    def factor(self, update: int) -> float:
        """Return the factor of the configured peak."""
        return self._factor(update) * (self._settings["lr"] / self._lr)

    def weight_decay(self, update: int) -> float:
        return self._weight_decay(update)

    def saved(self) -> dict[str, Any]:
        """Return plain values for ``restore``."""
        return dict(self._settings)

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Continue with the schedule of a checkpoint, where the configuration asks for it and the checkpoint has one."""
        if self._from_checkpoint and saved is not None:
            self._begin(saved)


def updates_per_move(schedule: ScheduleConfig, updates_per_step: int) -> int | None:
    """Return the planned updates between two moves of a rate that moves once per step; None where it moves with every update."""
    return updates_per_step if schedule.moves_every == "step" else None


def learning_rate_factor(
    schedule: ScheduleConfig, total_updates: int, updates_per_step: int = 1
) -> Callable[[int], float]:
    """Return the schedule as a function of the update number. A schedule that moves once per step counts steps."""
    shared_by = updates_per_step if schedule.moves_every == "step" else 1
    total = total_updates // shared_by
    if schedule.warmup_updates is None:
        warmup = schedule.warmup_ratio * total
        warmup = math.ceil(warmup) if schedule.warmup_rounding == "up" else int(warmup)
    else:
        warmup = math.ceil(schedule.warmup_updates / shared_by)
    shape = schedules.SCHEDULES[schedule.name]
    known = {
        "warmup_updates": warmup,
        "total_updates": math.ceil(schedule.decay_updates / shared_by) if schedule.decay_updates else total,
        "warmup_start_ratio": schedule.warmup_start_ratio,
        "min_lr_ratio": schedule.min_lr_ratio,
        "cycles": schedule.cycles,
        "stable_ratio": schedule.stable_ratio,
        "decay": schedule.decay,
        "timescale_updates": schedule.timescale_updates / shared_by if schedule.timescale_updates else None,
    }
    factor = partial(shape, **{name: value for name, value in known.items() if name in signature(shape).parameters})
    return lambda update: factor(update // shared_by + schedule.counts_from)


def weight_decay_at(optimizer: OptimizerConfig, total_updates: int) -> Callable[[int], float]:
    """Return the weight decay as a function of the update number."""
    return partial(
        schedules.weight_decay,
        total_updates=total_updates,
        start=optimizer.weight_decay,
        end=optimizer.weight_decay if optimizer.weight_decay_end is None else optimizer.weight_decay_end,
        shape=optimizer.weight_decay_shape,
    )
