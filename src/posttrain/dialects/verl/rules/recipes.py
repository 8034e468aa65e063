"""verl's recipes that sample ahead: fully_async_policy and one_step_off_policy on devices of their own, partial_rollout."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.verl.rules.early_correction import first_correction
from posttrain.dialects.verl.rules.gkd import gkd_loop, is_gkd
from posttrain.dialects.verl.rules.look import get
from posttrain.dialects.verl.rules.names import ACTOR, ROLLOUT

HYBRID = "actor_rollout_ref.hybrid_engine"
ASYNC = "async_training"
POOL = "rollout"  # the section of the sampler's devices, at the top
_STEP = "data.train_batch_size"
_CORRECTION = "algorithm.rollout_correction"
_SHARE, _OWN_SHARE = (f"{ROLLOUT}.{name}gpu_memory_utilization" for name in ("", "standalone_"))


def is_fully_async(keys: Reader) -> bool:
    return keys.written(ASYNC) and not is_partial_rollout(keys)


def is_partial_rollout(keys: Reader) -> bool:
    """Tell whether the recipe partial_rollout is meant, which has one key of the section alone and the policy's own devices."""
    alone = list(keys.section(ASYNC)) == ["partial_rollout"]
    return alone and get(keys, HYBRID, True) is not False and not has_own_devices(keys)


def has_own_devices(keys: Reader) -> bool:
    """Tell whether one of the recipes is meant, whose sampler has devices in a section at the top."""
    return any(keys.written(f"{POOL}.{name}") for name in ("nnodes", "n_gpus_per_node"))


def set_step(keys: Reader) -> None:
    """Count a step of fully_async as its mini-batches: it has no data.train_batch_size. Report values that verl refuses."""
    hybrid = get(keys, HYBRID, True)
    if not has_own_devices(keys) and not is_fully_async(keys):
        if hybrid is False:
            keys.problem(
                f"{HYBRID}=False gives the sampler devices of its own, and no key says which",
                key=HYBRID,
                fix=f"give +{POOL}.nnodes=1 +{POOL}.n_gpus_per_node=1, or use {HYBRID}=True",
            )
        return
    if hybrid is not False:
        keys.problem(
            f"the sampler has devices of its own ({POOL}.n_gpus_per_node), and {HYBRID} is {hybrid}",
            key=HYBRID if keys.written(HYBRID) else f"{POOL}.n_gpus_per_node",
            fix=f"use {HYBRID}=False",
        )
    if not is_fully_async(keys):
        return
    for key, wanted, why in (
        (_STEP, 0, f"a step is {ASYNC}.require_batches x {ACTOR}.ppo_mini_batch_size prompts"),
        ("data.gen_batch_size", 1, "prompts are sampled one by one"),
    ):
        if keys[key] != wanted and keys.written(key):
            keys.problem(
                f"with {ASYNC}, {key} is {wanted}, and it is {keys[key]}: {why}", key=key, fix=f"use {key}={wanted}"
            )
    keys.put(_STEP, max(1, _count(keys, "require_batches", 1)) * max(1, keys[f"{ACTOR}.ppo_mini_batch_size"]))
    keys.put("data.gen_batch_size", None)


def recipe(keys: Reader) -> dict[str, Any]:
    """Return the fields of a recipe, which replace those of other keys; empty without one."""
    if is_partial_rollout(keys):
        return _partial_rollout(keys)
    if is_fully_async(keys):
        return _fully_async(keys)
    if is_gkd(keys):
        return gkd_loop(keys)
    keys.ignore(_OWN_SHARE, f"the recipe fully_async_policy reads it, which {ASYNC} asks for")
    return _one_step_off(keys) if has_own_devices(keys) else {}


def _partial_rollout(keys: Reader) -> dict[str, Any]:
    """Return the fields of a synchronous loop whose longest responses continue in the next step."""
    if not get(keys, f"{ASYNC}.partial_rollout"):
        return {}
    keys.warn(
        f"{ASYNC}.partial_rollout: responses that are not complete at the end of a step continue in the next, which trains them "
        "(asynchronous.max_staleness_steps is 1; the recipe has no bound)"
    )
    return {"asynchronous.mode": "colocate", "asynchronous.max_staleness_steps": 1} | corrected(keys)


def _one_step_off(keys: Reader) -> dict[str, Any]:
    fields: dict[str, Any] = {"asynchronous.mode": "one_step", "asynchronous.max_staleness_steps": 1}
    if not keys.written(_CORRECTION) and not keys.written(f"{ACTOR}.use_rollout_log_probs"):
        keys.warn(
            "the recipe's own file has algorithm.rollout_correction.bypass_mode=True since verl 0.7, which is taken: the ratio "
            "starts from the sampler's log-probs"
        )
        fields["loss.rollout_correction.use_rollout_logprobs"] = True
        return fields
    return fields | corrected(keys)


def corrected(keys: Reader) -> dict[str, Any]:
    """Weigh the losses of stale tokens where no key does: verl trains on them as if the weights of the step had sampled them."""
    ratio = [] if is_fully_async(keys) else [f"{_CORRECTION}.bypass_mode", f"{ACTOR}.use_rollout_log_probs"]
    asked = any(get(keys, key) for key in (f"{_CORRECTION}.rollout_is", *ratio))
    if asked or first_correction(keys) or get(keys, f"{ACTOR}.tis_imp_ratio_cap", -1) > 0:
        return {}
    keys.warn(
        "responses of older weights are trained on as if the step's had sampled them, in verl; here their token losses are "
        f"multiplied by trainer / sampler, at most 2, as {_CORRECTION}.rollout_is=token does"
    )
    return {"loss.rollout_correction.weights": "token", "loss.rollout_correction.weight_high": 2.0}


def _fully_async(keys: Reader) -> dict[str, Any]:
    every, threshold = _count(keys, "trigger_parameter_sync_step", 4), get(keys, f"{ASYNC}.staleness_threshold", 0.1)
    step = keys[_STEP]
    if threshold < 0:
        keys.problem(
            f"{ASYNC}.staleness_threshold is {threshold}: it is the share of a cycle's samples that may be of older weights",
            key=f"{ASYNC}.staleness_threshold",
            fix=f"use {ASYNC}.staleness_threshold=0, or more",
        )
        threshold = 0
    bound = round(every * (1 + threshold) - 1, 9)
    fields: dict[str, Any] = {
        "data.prompts_per_step": step,
        "asynchronous.mode": "separate",
        "asynchronous.max_staleness_steps": int(bound) if bound % 1 == 0 else bound,
        "asynchronous.sync_every_steps": every,
        "asynchronous.sync_between_tokens": bool(get(keys, f"{ASYNC}.partial_rollout", True)),
        "validation.every_steps": _every(get(keys, f"{POOL}.test_freq", 1), every),
        "checkpoint.every_steps": _every(keys["trainer.save_freq"], every),
    }
    keys.ignore("trainer.test_freq", f"with {ASYNC}, {POOL}.test_freq says when to validate")
    share = get(keys, _OWN_SHARE)
    if share is not None:
        fields["rollout.engine_options.gpu_memory_utilization"] = share
        keys.ignore(_SHARE, f"the samplers have devices of their own, for which {_OWN_SHARE} counts")
    total = get(keys, f"{POOL}.total_rollout_steps", 100)
    if total is not None:
        if total < step:
            keys.problem(
                f"{POOL}.total_rollout_steps is {total} prompts, and a step takes {step}",
                key=f"{POOL}.total_rollout_steps",
                fix=f"use {POOL}.total_rollout_steps={step}, or more",
            )
        passes = [keys["trainer.total_epochs"], get(keys, f"{POOL}.total_epochs") or keys["trainer.total_epochs"]]
        fields |= {"run.total_steps": max(1, total // step), "run.within_epochs": True, "run.total_epochs": min(passes)}
    if get(keys, f"{ASYNC}.compute_prox_log_prob", False):
        fields["loss.rollout_correction.use_rollout_logprobs"] = False
    elif get(keys, f"{ASYNC}.use_rollout_log_probs", True):
        return fields | {
            "loss.rollout_correction.use_rollout_logprobs": True,
            "loss.rollout_correction.weights": "none",
        }
    return fields | (corrected(keys) if bound else {})


def _every(cycles: int, steps: int) -> int | None:
    """Cycles between two weight syncs as steps; None for never."""
    return cycles * steps if cycles > 0 else None


def _count(keys: Reader, name: str, otherwise: int) -> int:
    found = int(get(keys, f"{ASYNC}.{name}", otherwise))
    if found < 1:
        keys.problem(f"{ASYNC}.{name} is {found}", key=f"{ASYNC}.{name}", fix=f"use {ASYNC}.{name}=1, or more")
    return max(1, found)
