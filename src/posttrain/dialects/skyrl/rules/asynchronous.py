"""Fully asynchronous training of SkyRL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.skyrl.rules.look import get
from posttrain.registry import POLICY_LOSSES, ROLLOUT_ENGINES

_SECTION = "trainer.fully_async"
_ON = f"{_SECTION}.enabled"
_CLEAR = f"{_SECTION}.clear_kv_cache_on_weight_sync"
_LARGEST_WEIGHT = 2.0  # SkyRL's own where use_tis is on
_READ = ("max_staleness_steps", "num_parallel_generation_workers", "sample_full_batch", "clear_kv_cache_on_weight_sync")


def asynchronous(keys: Reader) -> dict[str, Any]:
    """Return the mode, its bound and the prompts in generation; empty for a synchronous run."""
    if not keys.ledger.find(_ON) or not keys[_ON]:
        for name in _READ:
            keys.ignore(f"{_SECTION}.{name}", f"{_ON} is not true, so steps sample and train in turns")
        return {}
    prompts, mini = keys["trainer.train_batch_size"], keys["trainer.policy_mini_batch_size"]
    if prompts != mini:
        keys.problem(
            f"fully asynchronous steps are one mini-batch, and trainer.train_batch_size={prompts} is not "
            f"trainer.policy_mini_batch_size={mini}",
            key="trainer.train_batch_size",
            fix=f"use trainer.train_batch_size={mini}",
        )
    if keys["trainer.placement.colocate_all"]:
        keys.problem(
            "fully asynchronous training samples on devices of its own, and trainer.placement.colocate_all is true",
            key="trainer.placement.colocate_all",
            fix="use trainer.placement.colocate_all=false",
        )
    fields: dict[str, Any] = {
        "asynchronous.mode": "separate",
        "asynchronous.max_staleness_steps": keys[f"{_SECTION}.max_staleness_steps"],
        "asynchronous.max_running_groups": keys[f"{_SECTION}.num_parallel_generation_workers"],
    }
    if keys.ledger.find(_CLEAR):
        fields["asynchronous.cache_on_new_weights"] = _cache(keys)
    if keys[f"{_SECTION}.sample_full_batch"]:
        if get(keys, "trainer.algorithm.zero_variance_filter"):
            fields["group_filter.strategy"] = "refill"
        else:
            keys.problem(
                "sample_full_batch replaces what trainer.algorithm.zero_variance_filter drops, and that is false",
                key=f"{_SECTION}.sample_full_batch",
                fix="use trainer.algorithm.zero_variance_filter=true",
            )
    return fields


def _cache(keys: Reader) -> str:
    """Keep the keys and values of unfinished responses, as SkyRL does, by an engine that has any when the weights change."""
    engine = get(keys, "generator.backend")
    if keys[_CLEAR]:
        return "recompute"
    if engine in ROLLOUT_ENGINES.names() and not ROLLOUT_ENGINES.facts(engine).keeps_cache:
        if keys.written(_CLEAR):
            keys.warn(
                f"{_CLEAR}=false has no effect: {engine} ends the responses that it has begun before it gets new weights, so no "
                "token is sampled on the keys and values of older ones"
            )
        return "recompute"
    return "keep"


def weights(keys: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of an asynchronous run that names none, also beside bounds beyond which responses are left out.

    SkyRL's losses take responses as if the step's own weights had sampled them.

    Args: fields of the loss and of the asynchronous run; SkyRL's example that samples a step ahead asks by its program alone.
    """
    ours = keys.section("posttrain").get("asynchronous")
    ahead = isinstance(ours, dict) and ours.get("mode", "off") != "off"
    stale = fields.get("asynchronous.max_staleness_steps", 0)
    correction = "loss.rollout_correction"
    has_one = any(fields.get(f"{correction}.{name}") for name in ("weights", "use_rollout_logprobs"))
    inputs = POLICY_LOSSES.known(fields.get("loss.name", ""), fields.get("loss.path")).inputs
    if not (ahead or stale) or has_one or "rollout_logprobs" in inputs:
        return {}
    older = f"up to {stale} steps" if stale else "a step"
    keys.warn(
        f"responses are of weights {older} older, which SkyRL treats as if the step's had sampled them; here their token losses "
        f"are multiplied by trainer / sampler, at most {_LARGEST_WEIGHT:g}, as trainer.algorithm.use_tis=true does"
    )
    return {f"{correction}.weights": "token", f"{correction}.weight_high": _LARGEST_WEIGHT}
