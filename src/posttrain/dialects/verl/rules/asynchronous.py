"""Asynchronous modes of verl's later loop."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.verl.rules.look import get
from posttrain.dialects.verl.rules.names import ACTOR
from posttrain.dialects.verl.rules.recipes import corrected
from posttrain.errors import did_you_mean

_V1 = "trainer.v1"
_MODE = f"{_V1}.trainer_mode"
_THRESHOLD = f"{_V1}.sampler.max_off_policy_threshold"
_STRATEGY = f"{_V1}.sampler.max_off_policy_strategy"
_CYCLE = f"{_V1}.separate_async.parameter_sync_step"
_MODES = {"sync": "off", "colocate_async": "colocate", "separate_async": "separate"}


def set_generation(keys: Reader) -> None:
    """Leave out the prompts that the later loop's asynchronous modes read at a time: 1 there, whatever is written."""
    if get(keys, _MODE, "sync") not in ("colocate_async", "separate_async"):
        return
    if (size := keys["data.gen_batch_size"]) not in (None, 1):
        keys.warn(
            f"data.gen_batch_size={size} has no effect: with {_MODE}={get(keys, _MODE)} verl reads prompts one by one"
        )
    keys.put("data.gen_batch_size", None)


def asynchronous(keys: Reader) -> dict[str, Any]:
    """Return the mode and its bound; empty for a synchronous run."""
    mode = get(keys, _MODE, "sync")
    if mode not in _MODES:
        keys.problem(
            f"{_MODE} is {mode} (known: {', '.join(_MODES)})",
            key=_MODE,
            fix=did_you_mean(str(mode), list(_MODES)) or f"use {_MODE}=sync",
        )
        return {}
    if mode == "sync":
        for key in (_THRESHOLD, _STRATEGY, _CYCLE):
            keys.ignore(key, f"{_MODE} is sync, so nothing gets stale")
        return {}
    fields: dict[str, Any] = {"asynchronous.mode": _MODES[mode]}
    if mode == "separate_async":
        fields["asynchronous.sync_every_steps"] = 1
        _check_cycle(keys)
    else:
        keys.ignore(_CYCLE, f"{_MODE} is not separate_async")
    threshold, strategy = get(keys, _THRESHOLD, 8), get(keys, _STRATEGY, "drop")  # verl's defaults
    if threshold < 1:
        keys.problem(
            f"{_THRESHOLD} is {threshold}: what is sampled in a step and trained in it counts 1",
            key=_THRESHOLD,
            fix=f"use {_THRESHOLD}=2, which allows 1 step between sampling and training",
        )
    else:
        fields["asynchronous.max_staleness_steps"] = threshold - 1
    if strategy not in ("drop", "wait"):
        keys.problem(f"{_STRATEGY} is {strategy} (known: drop, wait)", key=_STRATEGY, fix=f"use {_STRATEGY}=wait")
    else:
        fields["asynchronous.on_stale"] = strategy
    return fields | (corrected(keys) if threshold > 1 else {})


def _check_cycle(keys: Reader) -> None:
    """A cycle between two weight syncs is a step, in so many mini-batches."""
    cycle = get(keys, _CYCLE)
    step, mini = keys["data.train_batch_size"], keys[f"{ACTOR}.ppo_mini_batch_size"]
    if cycle is not None and cycle * mini != step:
        fix = (
            f"use {_CYCLE}={step // mini}" if mini and step % mini == 0 else f"use data.train_batch_size={cycle * mini}"
        )
        keys.problem(
            f"{_CYCLE} is {cycle}, and {cycle} x {ACTOR}.ppo_mini_batch_size={mini} = {cycle * mini} is not "
            f"data.train_batch_size={step}",
            key=_CYCLE,
            fix=fix,
        )
