"""Asynchronous generation of ROLL."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reading import Reader
from posttrain.dialects.roll.rules.look import is_agentic

_RATIO = "async_generation_ratio"
_EVERY = "actor_train.model_update_frequency"


def asynchronous(keys: Reader) -> dict[str, Any]:
    """Return the mode and its bound; empty for a synchronous run."""
    ratio, every = keys[_RATIO], keys[_EVERY]
    if every < 1:
        keys.problem(f"{_EVERY} is {every}", key=_EVERY, fix=f"use {_EVERY}=1")
        every = 1
    if ratio <= 0:  # negative numbers are reported by the lengths
        if every > 1:
            keys.plan_only(
                f"{_EVERY} is {every}, and {_RATIO} is 0: samplers that keep older weights and wait for the trainer are planned",
                key=_EVERY,
                fix=f"use {_EVERY}=1, or {_RATIO}=1",
            )
        return {}
    if ratio % 1 and is_agentic(keys):
        keys.problem(
            f"{_RATIO} is {ratio}, and the agentic pipeline counts whole steps",
            key=_RATIO,
            fix=f"use {_RATIO}={int(ratio) + 1}",
        )
        return {}
    bound = ratio + every - 1
    return {
        "asynchronous.mode": "separate",
        "asynchronous.max_staleness_steps": int(bound) if bound % 1 == 0 else bound,
        "asynchronous.sync_every_steps": every,
    }
