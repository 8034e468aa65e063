"""Settings of sampling ahead of training."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from posttrain.config.base import Section

MOST_STEPS = 1_000_000  # of a bound on staleness: a larger one is a slip, and no run is as long


def _whole(steps: float) -> float:
    """Return a whole number of steps as an int, however it is written: 2.0 is 2."""
    return int(steps) if steps == int(steps) else steps


Steps = Annotated[
    int | float,
    Field(ge=0, le=MOST_STEPS),
    AfterValidator(_whole),
    # pydantic gives the schema of a union no bounds
    WithJsonSchema({"type": "number", "minimum": 0, "maximum": MOST_STEPS}),
]


class AsynchronousConfig(Section):
    """Sampling that runs ahead of training, within a bound on how old a trained response may be (docs/async.md)."""

    mode: Literal["off", "one_step", "colocate", "separate"] = "off"
    """off: a step trains on what it samples. one_step: the next step's responses are sampled while this one trains. colocate:
    on the same devices, one or several; a step trains as soon as enough groups are complete, and unfinished responses keep
    their tokens and continue under the new weights. separate: samplers with devices of their own work while the trainer does,
    and get new weights between two tokens."""
    max_staleness_steps: Steps = 1
    """Bound on staleness: steps that were trained between the weights of a group's oldest token and the step that trains it,
    waiting time included. It always holds: a group is only started when it can still be trained in time. With 1.5, groups
    are at most 2 steps stale, and those that are 2 make up at most half a step."""
    on_stale: Literal["wait", "drop"] = "wait"
    """A group is not complete when it has to be trained: wait, so that nothing is lost; or drop it, which favours short
    responses: every drop is in schedule.jsonl, and its prompt is sampled again once."""
    max_running_groups: int | None = Field(default=None, ge=1)
    """Groups sampled at a time, in colocate and separate: from data.prompts_per_step to (max_staleness_steps + 1) times that;
    null means the latter."""
    sync_every_steps: int = Field(default=1, ge=1)
    """Steps after which the samplers get new weights, in separate: at most max_staleness_steps + 1."""
    prepared_groups: int = Field(default=0, ge=0)
    """Groups whose environments are started before they are admitted, in colocate with environment.workers: a slow reset then
    costs neither time nor staleness, because no token is sampled before it. They occupy workers."""
    cache_on_new_weights: Literal["recompute", "keep"] = "recompute"
    """Keys and values of unfinished responses when the weights change: recompute them with the new weights, so that log-probs are
    those of one version; or keep them, which costs memory while the step trains and no prefill after it. Only engines that
    can keep them take it; a resumed run computes them again."""
    sync_between_tokens: bool = True
    """Responses continue under new weights, in separate; false: those that have begun end first, each under one version."""
    wait_timeout_s: float = Field(default=3600.0, gt=0.0)
    """Seconds without a token, or after the updates, that a step waits for the sampler before the run stops."""

    @property
    def is_on(self) -> bool:
        return self.mode != "off"


def groups_in(steps: float, groups_per_step: int) -> int:
    """Groups of so many steps, rounded down. ``steps`` is the number as it is written: of 5 groups 1.2 steps are 6, although
    5 * (1.2 % 1) = 0.9999999999999998."""
    return math.floor(Fraction(str(steps)) * groups_per_step)
