"""verl's recipe prime: a process reward model that is trained during the run, and a filter of prompts by their accuracy."""

from __future__ import annotations

import math
from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.verl.rules.batches import per_device
from posttrain.dialects.verl.rules.look import get
from posttrain.dialects.verl.rules.names import MODEL, ROLLOUT
from posttrain.dialects.verl.strategies import SHARDED

_MODEL = "reward_model"
_GRANULARITY = f"{_MODEL}.prime_granularity"
_WEIGHTS = {
    "advantage.process_weight": "algorithm.reward_dpo_coef",
    "advantage.outcome_weight": "algorithm.reward_gt_coef",
}
_ESTIMATOR = "algorithm.adv_estimator"
_FILTER = ("filter_accuracy", "filter_truncate", "accuracy_lower_bound", "accuracy_upper_bound", "oversample_factor")
_OPTIMIZER = f"{_MODEL}.model.optim"
_SHARDS = f"{_MODEL}.model.fsdp_config"
_OPTIONS = (  # of the engine, for both models
    "fsdp_size",
    "param_offload",
    "reshard_after_forward",
    "forward_prefetch",
    "wrap_policy.min_num_params",
    "wrap_policy.transformer_layer_cls_to_wrap",
)
_OURS = "reward.process"


def is_prime(keys: Reader) -> bool:
    """Tell whether the recipe is meant: no other trainer of verl reads its keys."""
    return any(keys.ledger.find(key) and keys.written(key) for key in (_GRANULARITY, *_WEIGHTS.values()))


def prime_estimator(keys: Reader) -> dict[str, Any]:
    """The recipe's advantage; it has no other."""
    if keys[_ESTIMATOR] != "rloo":
        what = f"{_ESTIMATOR} is {keys[_ESTIMATOR]}: the recipe prime has rloo alone, over process rewards and outcomes"
        keys.problem(what, key=_ESTIMATOR, fix=f"use {_ESTIMATOR}=rloo")
    return {"advantage.name": "prime"} | {field: get(keys, key, 5.0) for field, key in _WEIGHTS.items()}


def process_reward(keys: Reader, devices: int) -> dict[str, Any]:
    """The process reward model, and its optimizer; its learning rate is constant after a warm-up in steps."""
    if not keys[f"{_MODEL}.enable"]:
        what = f"the recipe prime without a reward model ({_MODEL}.enable=False) has no process rewards"
        keys.problem(what, key=f"{_MODEL}.enable", fix=f"use {_MODEL}.enable=True, or verl.trainer.main_ppo with rloo")
    path = keys[f"{_MODEL}.model.path"]
    reference = get(keys, f"{_MODEL}.model.ref_path", path)
    update = get(keys, f"{_MODEL}.model.update", "none")
    size = per_device(keys, f"{_MODEL}.micro_batch_size", devices, needed=True)
    mini_batch = get(keys, f"{_MODEL}.mini_batch_size", keys["actor_rollout_ref.actor.ppo_mini_batch_size"])
    fields = {
        f"{_OURS}.path": None if path == keys[f"{MODEL}.path"] else path,
        f"{_OURS}.reference_path": None if reference == path else reference,
        f"{_OURS}.update": "never" if update == "none" else update,
        f"{_OURS}.log_ratio_scale": get(keys, f"{_MODEL}.model.beta_train", 0.05),
        f"{_OURS}.normalize": get(keys, f"{_MODEL}.prime_norm", "batch_norm") == "batch_norm",
        f"{_OURS}.sequences_per_mini_batch": mini_batch,
        f"{_OURS}.gradient_checkpointing": get(keys, f"{_MODEL}.model.enable_gradient_checkpointing", False),
        f"{_OURS}.optimizer.lr": get(keys, f"{_OPTIMIZER}.lr", 1e-6),
        f"{_OURS}.optimizer.weight_decay": get(keys, f"{_OPTIMIZER}.weight_decay", 0.0),
        f"{_OURS}.optimizer.max_grad_norm": get(keys, f"{_OPTIMIZER}.grad_clip", 10.0),
        f"{_OURS}.schedule.moves_every": "step",
        f"{_OURS}.schedule.warmup_updates": _warmup(keys) * _updates(keys, mini_batch),
    }
    fields |= _sharded(keys, devices)
    return fields | ({f"{_OURS}.sequences_per_micro_batch": size} if size is not None else {})


def _sharded(keys: Reader, devices: int) -> dict[str, Any]:
    """The shards of the process reward model and of its reference, over the devices of the policy."""
    fields = {f"{_OURS}.optimizer.offload": get(keys, f"{_SHARDS}.optimizer_offload", False)}
    if devices == 1 or keys["actor_rollout_ref.actor.strategy"] not in SHARDED:
        for name in _OPTIONS:
            keys.ignore(f"{_SHARDS}.{name}", "the process reward model is split like the policy, by its engine")
        return fields
    found = {name: get(keys, f"{_SHARDS}.{name}") for name in _OPTIONS}
    smallest = get(keys, f"{_SHARDS}.min_num_params")  # the earlier name
    if smallest and not found["wrap_policy.min_num_params"]:
        found["wrap_policy.min_num_params"] = smallest
    return fields | {f"{_OURS}.engine_options.{name}": value for name, value in found.items() if value is not None}


def _warmup(keys: Reader) -> int:
    """Steps of warm-up. The ratio is of the recipe's own total_training_steps, which is -1 unless it is written."""
    steps = get(keys, f"{_OPTIMIZER}.lr_warmup_steps", -1)
    if steps >= 0:
        return int(steps)
    ratio, total = (
        get(keys, f"{_OPTIMIZER}.lr_warmup_steps_ratio", 0.0),
        get(keys, f"{_OPTIMIZER}.total_training_steps", -1),
    )
    if ratio and total < 0:
        keys.ignore(
            f"{_OPTIMIZER}.lr_warmup_steps_ratio", f"{_OPTIMIZER}.total_training_steps, which it is a share of, is -1"
        )
    return max(0, int(ratio * total))


def _updates(keys: Reader, mini_batch: int) -> int:
    """Updates of the process reward model in a step: its mini-batches count sequences, where the actor's count prompts."""
    sequences = keys["data.train_batch_size"] * keys[f"{ROLLOUT}.n"]
    return max(1, -(-sequences // max(1, mini_batch)))


def prime_filter(keys: Reader) -> dict[str, Any]:
    """Oversampled prompts, of which those with an accuracy within the bounds come first."""
    factor = get(keys, "data.oversample_factor", 1.0)
    if factor < 1 or factor != int(factor):
        what = f"data.oversample_factor is {factor:g}: whole batches of prompts are sampled for a step"
        keys.problem(what, key="data.oversample_factor", fix=f"use data.oversample_factor={max(1, round(factor))}")
    fields: dict[str, Any] = {
        "group_filter.strategy": "prefer",
        "group_filter.oversample": max(1, int(factor)),
        "group_filter.above_std": None,
    }
    if get(keys, "data.filter_accuracy", False):
        # The recipe keeps groups at the bounds, too.
        low, high = get(keys, "data.accuracy_lower_bound", 0.2), get(keys, "data.accuracy_upper_bound", 0.8)
        fields["group_filter.above_mean"] = math.nextafter(low, -math.inf)
        fields["group_filter.below_mean"] = math.nextafter(high, math.inf)
    else:
        for name in ("accuracy_lower_bound", "accuracy_upper_bound"):
            keys.ignore(f"data.{name}", "data.filter_accuracy is false")
    if get(keys, "data.filter_truncate", False):
        fields["group_filter.below_tokens"] = max(1, keys[f"{ROLLOUT}.response_length"] - 1)
    return fields


def without_prime(keys: Reader) -> None:
    """Report the recipe's keys in a run that is none of its own."""
    sections = ("optim", "update", "beta_train", "ref_path", "enable_gradient_checkpointing")
    for key in (*(f"data.{name}" for name in _FILTER), f"{_MODEL}.mini_batch_size", f"{_MODEL}.prime_norm"):
        keys.ignore(key, f"the recipe prime reads it, which {_GRANULARITY} asks for")
    for name in sections:
        keys.ignore(f"{_MODEL}.model.{name}", f"the recipe prime reads it, which {_GRANULARITY} asks for")
