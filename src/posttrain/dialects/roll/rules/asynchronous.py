"""Asynchronous generation of ROLL."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reading import Reader
from posttrain.dialects.roll.rules.look import is_agentic

_RATIO = "async_generation_ratio"
_EVERY = "actor_train.model_update_frequency"
_CORRECTION = "train_infer_correction.is_weight"


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
    return _corrected(keys) | {
        "asynchronous.mode": "separate",
        "asynchronous.max_staleness_steps": int(bound) if bound % 1 == 0 else bound,
        "asynchronous.sync_every_steps": every,
    }


def _corrected(keys: Reader) -> dict[str, Any]:
    """Weigh the losses of stale tokens where the configuration does not: ROLL trains on them as if they were not stale."""
    if keys[f"{_CORRECTION}.enabled"]:
        return {}
    bound = keys[f"{_CORRECTION}.upper_bound"] or 1.2
    keys.warn(
        f"{_RATIO}={keys[_RATIO]:g} trains on responses of older weights, which ROLL treats as if the step's had sampled them; "
        f"here their token losses are multiplied by trainer / sampler, at most {bound:g}, as {_CORRECTION}.enabled=true does"
    )
    return {"loss.rollout_correction.weights": "token", "loss.rollout_correction.weight_high": bound}
