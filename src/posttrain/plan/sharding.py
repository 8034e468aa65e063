"""How the engine fsdp shares a model out: ``engine_options`` of policy and critic, in the words of FSDP1, FSDP2 and the dialects.

Read here once, torch-free, so that a plan can be checked and priced; the engine takes the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.errors import Problem, did_you_mean

DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp32", "float32", "torch.float32"), "float32"),
}
# What FSDP1 or a peer has a setting for, and is otherwise here: name -> what happens instead.
WITHOUT_EFFECT = {
    "use_orig_params": "FSDP2 always keeps the parameters as the model has them",
    "grad_offload": "gradients leave with offload_policy; otherwise an update takes them at once",
    "use_batched_model_update": "weights always go to the sampler in buckets (rollout.weight_bucket_mib)",
    "reduce_scatter_during_grad_accumulation": "gradients are reduced at every micro-batch, so that only parts are held",
    "async_save_ckpt": "a checkpoint is complete before the run goes on",
    "save_only_model": "checkpoint.save_optimizer says what is saved",
    "apply_tiled_mlp": "model.gradient_checkpointing bounds what an MLP keeps",
    "tiled_num_shards": "model.gradient_checkpointing bounds what an MLP keeps",
}
_IN_WRAP_POLICY = ("disable", "min_num_params", "transformer_layer_cls_to_wrap")
_IN_MIXED_PRECISION = ("param_dtype", "reduce_dtype", "buffer_dtype")
KNOWN = (
    "fsdp_size", "reshard_after_forward", "forward_prefetch", "offload_policy", "cpu_offload", "offload_params",
    "param_offload", "optimizer_offload", "offload_after_step", "param_dtype", "reduce_dtype", "mixed_precision",
    "wrap_policy", "ep_size", "efsdp_size", "moe_use_grouped_mm", *WITHOUT_EFFECT,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpSettings:
    """How a model is cut, and what happens to its parts."""

    shard: int  # ranks that keep one copy together
    replicas: int = 1  # such groups, with equal parts: hybrid sharding
    reshard_after_forward: bool | int = (
        True  # False: stay gathered until the backward pass; a number: in groups of so many
    )
    cpu_offload: bool = False  # parts, gradients and optimizer in CPU memory
    param_offload: bool = False  # parts in CPU memory while other models work on the device
    optimizer_offload: bool = False  # the optimizer's averages in CPU memory between updates
    forward_prefetch: bool = False  # gather the next layer while one computes
    layers: tuple[str, ...] | None = (
        None  # classes of the units that are gathered one at a time; None: as the model says
    )
    smallest_unit: int = 0  # parameters; above 0 units are modules of at least so many, whatever their class
    one_unit: bool = False  # gather everything at once
    param_dtype: str | None = None  # of gathered weights; None: model.compute_dtype
    reduce_dtype: str = "float32"  # in which gradients are added up over ranks


def fsdp_settings(
    options: Mapping[str, Any], ranks: int, *, role: str = "policy"
) -> tuple[FsdpSettings, list[Problem], list[str]]:
    """The settings; what is wrong with the options; and what of them has no effect, in sentences.

    Args: ranks of the role; a size of the shard group below 1, or of all of them and more, means all.
    """
    at = f"{role}.engine_options"
    problems, told = [], []
    for name in options:
        if name not in KNOWN:
            what = f"fsdp has no option {name}"
            problems.append(Problem(what, fix=did_you_mean(name, KNOWN, listed=True), field=f"{at}.{name}"))
    told += [f"{at}.{name} has no effect: {why}" for name, why in WITHOUT_EFFECT.items() if options.get(name)]
    frozen = role == "reference"
    problems += [
        Problem(f"{name}={options[name]}: fsdp does not split experts", fix=f"use {at}.{name}=1", field=f"{at}.{name}")
        for name in ("ep_size", "efsdp_size")
        if options.get(name) not in (None, 1)
    ]
    if options.get("moe_use_grouped_mm"):
        told.append(f"{at}.moe_use_grouped_mm has no effect: experts run as the model's own code runs them")
    shard = _shard(options, ranks, at, problems)
    reshard = _reshard(options, shard, at, problems)
    wrap = _section(options, "wrap_policy", _IN_WRAP_POLICY, at, problems, told)
    layers = wrap.get("transformer_layer_cls_to_wrap")
    precision = _section(options, "mixed_precision", _IN_MIXED_PRECISION, at, problems, told)
    if precision.get("buffer_dtype"):
        told.append(f"{at}.mixed_precision.buffer_dtype has no effect: buffers keep the precision the model gives them")
    dtypes = {
        name: _dtype(options.get(name) or precision.get(name), f"{at}.{name}", problems)
        for name in ("param_dtype", "reduce_dtype")
    }
    # What is frozen has no optimizer to come back to: between phases and always on the CPU are the same for it.
    keeps_off = ("offload_policy", "cpu_offload", *(("param_offload",) if frozen else ()))
    offload = [name for name in keeps_off if options.get(name)]
    leaves = bool(options.get("param_offload")) and not frozen
    if leaves and offload:
        told.append(f"{at}.param_offload has no effect: {offload[0]} keeps the weights on the CPU always")
    if options.get("offload_params") and not offload:
        told.append(
            f"{at}.offload_params has no effect: cpu_offload takes parameters, gradients and optimizer together, and is off"
        )
    return (
        FsdpSettings(
            shard=shard,
            replicas=ranks // shard,
            reshard_after_forward=reshard,
            cpu_offload=bool(offload),
            param_offload=leaves and not offload,
            optimizer_offload=any(bool(options.get(name)) for name in ("optimizer_offload", "offload_after_step")),
            forward_prefetch=bool(options.get("forward_prefetch")),
            layers=(layers,) if isinstance(layers, str) else tuple(layers) if layers else None,
            smallest_unit=int(wrap.get("min_num_params") or 0),
            one_unit=bool(wrap.get("disable")),
            param_dtype=dtypes["param_dtype"],
            reduce_dtype=dtypes["reduce_dtype"] or "float32",
        ),
        problems,
        told,
    )


def _shard(options: Mapping[str, Any], ranks: int, at: str, problems: list[Problem]) -> int:
    asked = options.get("fsdp_size")
    if asked is None:
        return ranks
    if isinstance(asked, bool) or not isinstance(asked, int):
        what = f"{at}.fsdp_size counts devices, and is {asked!r}"
        problems.append(Problem(what, fix="use -1 for all", field=f"{at}.fsdp_size"))
        return ranks
    if asked < 1 or asked >= ranks:
        return ranks
    if ranks % asked:
        fits = [size for size in range(1, ranks + 1) if ranks % size == 0]
        near = min(fits, key=lambda size: abs(size - asked))
        what = f"{ranks} devices do not split into groups of {asked} that keep one copy of the weights"
        problems.append(Problem(what, fix=f"use {at}.fsdp_size={near}, or -1 for all", field=f"{at}.fsdp_size"))
        return ranks
    return asked


def _reshard(options: Mapping[str, Any], shard: int, at: str, problems: list[Problem]) -> bool | int:
    """True and 1..shard as torch takes them: a number must divide the shard group; the whole group is True."""
    asked = options.get("reshard_after_forward")
    if asked is None:
        return True
    field = f"{at}.reshard_after_forward"
    if isinstance(asked, bool):
        return asked
    if not isinstance(asked, int) or asked < 1 or shard % asked:
        what = f"{field}={asked!r} is neither true nor false nor a divisor of the {shard} devices that keep one copy"
        problems.append(Problem(what, fix="use true", field=field))
        return True
    return {shard: True, 1: False}.get(asked, asked)  # shared out over one device is not shared out


def _section(
    options: Mapping[str, Any], name: str, known: tuple[str, ...], at: str, problems: list[Problem], told: list[str]
) -> Mapping[str, Any]:
    value = options.get(name) or {}
    if not isinstance(value, Mapping):
        problems.append(Problem(f"{at}.{name} holds settings, and is {value!r}", field=f"{at}.{name}"))
        return {}
    told += [f"{at}.{name}.{key} has no effect: fsdp does not read it" for key in value if key not in known]
    return value


def _dtype(asked: Any, field: str, problems: list[Problem]) -> str | None:
    if asked is None:
        return None
    if str(asked) not in DTYPES:
        what = f"{field}={asked}: no such precision for fsdp"
        problems.append(Problem(what, fix="use bf16 or fp32", field=field))
        return None
    return DTYPES[str(asked)]
