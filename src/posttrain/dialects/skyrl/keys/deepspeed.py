"""Keys of the top-level section deepspeed_config: what DeepSpeed is told, for training (policy, critic) and for the reference."""

from __future__ import annotations

from typing import Any, Literal

from posttrain.dialects.ledger import ABSENT, Key, ignored, mapped

_Auto = int | float | Literal["auto"]
_OFFLOAD = "where DeepSpeed keeps the weights: none, cpu, nvme"


def _row(kind: str, name: str, type: Any, default: Any, meaning: str, note: str = "") -> Key:
    roles = ("policy", "critic") if kind == "train" else ("reference",)
    fields = " ".join(f"{role}.engine_options.{name}" for role in roles)
    return mapped(f"deepspeed_config.{kind}.{name}", type, default, fields, meaning, by_rule=True, note=note)


def _clipping(kind: str) -> Key:
    return ignored(
        f"deepspeed_config.{kind}.gradient_clipping",
        float,
        1.0,
        "optimizer_config.max_grad_norm decides, as in SkyRL",
        "clip the gradient norm to this",
    )


_ZERO = "zero_optimization"

ROWS: tuple[Key, ...] = (
    _row(
        "train",
        f"{_ZERO}.stage",
        int,
        3,
        "ZeRO stage; 3 is the only one",
        "The page calls it deepspeed_config.zero_optimization.stage; the key has .train or .eval in between.",
    ),
    _row("train", f"{_ZERO}.offload_param.device", str, "none", _OFFLOAD),
    _row("train", f"{_ZERO}.offload_optimizer.device", str, "none", "where the optimizer state is kept"),
    _row("train", f"{_ZERO}.offload_optimizer.pin_memory", bool, True, "in pinned memory"),
    _row("train", f"{_ZERO}.sub_group_size", _Auto, "auto", "parameters updated at a time"),
    _row("train", f"{_ZERO}.reduce_bucket_size", _Auto, "auto", "elements reduced at a time"),
    _row("train", f"{_ZERO}.stage3_param_persistence_threshold", _Auto, "auto", "smaller parameters are not sharded"),
    _row("train", f"{_ZERO}.stage3_prefetch_bucket_size", _Auto, "auto", "elements fetched ahead"),
    _row("train", f"{_ZERO}.stage3_max_live_parameters", _Auto, "auto", "parameters gathered at a time"),
    _row("train", f"{_ZERO}.stage3_max_reuse_distance", _Auto, "auto", "parameters used again sooner stay gathered"),
    _row("train", f"{_ZERO}.round_robin_gradients", bool, True, "spread the copying of gradients"),
    _row("train", f"{_ZERO}.zero_hpz_partition_size", int, 1, "devices of a second, nearer partition"),
    _row("train", f"{_ZERO}.zero_quantized_weights", bool, False, "gather weights in 8 bits"),
    _row("train", f"{_ZERO}.zero_quantized_gradients", bool, False, "reduce gradients in 4 bits"),
    _row("train", "disable_trace_cache", bool, False, "true: nothing is fetched ahead or kept for reuse"),
    _row("train", "data_types.grad_accum_dtype", str, "fp32", "dtype in which gradients add up"),
    _clipping("train"),
    _row("train", "wall_clock_breakdown", bool, False, "log the time of every part"),
    _row("train", "prescale_gradient", bool, False, "divide gradients before they are reduced"),
    mapped(
        "deepspeed_config.train.**",
        Any,
        ABSENT,
        "policy.engine_options critic.engine_options",
        "one more DeepSpeed setting for training",
        by_rule=True,
    ),
    _row("eval", f"{_ZERO}.stage", int, 3, "ZeRO stage"),
    _row("eval", f"{_ZERO}.stage3_param_persistence_threshold", _Auto, "auto", "smaller parameters are not sharded"),
    _row("eval", f"{_ZERO}.offload_param.device", str, "cpu", _OFFLOAD),
    _row("eval", f"{_ZERO}.offload_param.pin_memory", bool, True, "in pinned memory"),
    _clipping("eval"),
    _row("eval", "prescale_gradient", bool, False, "divide gradients before they are reduced"),
    _row("eval", "wall_clock_breakdown", bool, False, "log the time of every part"),
    mapped(
        "deepspeed_config.eval.**",
        Any,
        ABSENT,
        "reference.engine_options",
        "one more DeepSpeed setting for the reference",
        by_rule=True,
    ),
)
