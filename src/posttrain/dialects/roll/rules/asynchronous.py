"""Asynchronous generation of ROLL."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.roll.rules.look import is_agentic
from posttrain.dialects.roll.rules.placement import device_ids

_RATIO = "async_generation_ratio"
_EVERY = "actor_train.model_update_frequency"
_CORRECTION = "train_infer_correction.is_weight"


def asynchronous(keys: Reader) -> dict[str, Any]:
    """Return the mode and its bound; empty for a synchronous run."""
    ratio, every = keys[_RATIO], keys[_EVERY]
    if every < 1:
        keys.problem(f"{_EVERY} is {every}", key=_EVERY, fix=f"use {_EVERY}=1")
        every = 1
    if ratio <= 0 and keys["is_use_additional_prompts"]:
        keys.warn("is_use_additional_prompts=true waits for slow prompts here, and replaces those that a filter drops")
    if ratio <= 0:  # negative numbers are reported by the lengths
        return _older_weights(keys, every) if every > 1 else {}
    if ratio % 1 and is_agentic(keys):
        keys.problem(
            f"{_RATIO} is {ratio}, and the agentic pipeline counts whole steps",
            key=_RATIO,
            fix=f"use {_RATIO}={int(ratio) + 1}",
        )
        return {}
    bound = round(ratio + every - 1, 9)
    return _corrected(keys, f"{_RATIO}={ratio:g}") | {
        "asynchronous.mode": "separate",
        "asynchronous.max_staleness_steps": int(bound) if bound % 1 == 0 else bound,
        "asynchronous.sync_every_steps": every,
        "asynchronous.on_stale": "drop" if _takes_the_first(keys) else "wait",
    }


def _older_weights(keys: Reader, every: int) -> dict[str, Any]:
    """Return the mode of a synchronous pipeline whose samplers get new weights every so many steps: devices of their own sample
    ahead within the same bound. Samplers on the policy's devices read its weights, or get those of every step."""
    devices = [set(device_ids(keys, name)) for name in ("actor_train", "actor_infer")]
    if not all(devices) or devices[0] & devices[1]:
        keys.problem(
            f"{_EVERY} is {every}, and samplers on the policy's devices always have the weights of the step",
            key=_EVERY,
            fix=f"use {_EVERY}=1, or put actor_infer.device_mapping on devices of its own",
            refused=True,
        )
        return {}
    return _corrected(keys, f"{_EVERY}={every}") | {
        "asynchronous.mode": "separate",
        "asynchronous.max_staleness_steps": every - 1,
        "asynchronous.sync_every_steps": every,
    }


def _takes_the_first(keys: Reader) -> bool:
    """Tell whether steps take the prompts that are complete first. A fraction of a step, which alone may be of the oldest, is
    chosen among all that are complete."""
    extra = "is_use_additional_prompts"
    if not keys[extra]:
        return False
    if keys[_RATIO] % 1:
        keys.warn(
            f"{extra}=true waits for slow prompts: with {_RATIO}={keys[_RATIO]:g} no more than a fraction may be old"
        )
        return False
    return True


def _corrected(keys: Reader, cause: str) -> dict[str, Any]:
    """Weigh the losses of stale tokens where the configuration does not: ROLL trains on them as if they were not stale."""
    if keys[f"{_CORRECTION}.enabled"]:
        return {}
    bound = keys[f"{_CORRECTION}.upper_bound"] or 1.2
    keys.warn(
        f"{cause} trains on responses of older weights, which ROLL treats as if the step's had sampled them; "
        f"here their token losses are multiplied by trainer / sampler, at most {bound:g}, as {_CORRECTION}.enabled=true does"
    )
    return {"loss.rollout_correction.weights": "token", "loss.rollout_correction.weight_high": bound}
