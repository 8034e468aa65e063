"""How the engine deepspeed shares a model out: ``engine_options`` of policy, critic and reference, in DeepSpeed's own words.

ZeRO (arXiv:1910.02054) spreads the optimizer's state over the devices (stage 1), gradients too (2), weights too (3). Read here
once, torch-free, so that a plan can be checked and priced; the engine takes the result. Nothing reaches DeepSpeed unread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from posttrain.errors import Problem, did_you_mean

AUTO = "auto"
DEFAULT_STAGE = 3
_ZERO = "zero_optimization"
BYTES = {"float32": 4, "bfloat16": 2}
_DTYPES = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
# Words of zero_optimization that DeepSpeed is handed: what must be true of the value.
_SWITCHES = (
    "allgather_partitions", "overlap_comm", "reduce_scatter", "contiguous_gradients", "round_robin_gradients",
)  # fmt: skip
_SIZES = (
    "allgather_bucket_size", "reduce_bucket_size", "sub_group_size", "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance",
)  # fmt: skip
# auto, as transformers resolves it: from the hidden size h. Other sizes that are auto are DeepSpeed's own defaults.
_OF_HIDDEN_SIZE = {
    "reduce_bucket_size": lambda h: h * h,
    "stage3_prefetch_bucket_size": lambda h: int(0.9 * h * h),
    "stage3_param_persistence_threshold": lambda h: 10 * h,
}
_OFFLOADS = ("offload_optimizer", "offload_param")
_QUANTIZED = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")
_IN_ZERO = (
    "stage", *_SWITCHES, *_SIZES, *_OFFLOADS, *_QUANTIZED, "zero_hpz_partition_size",
    "stage3_gather_16bit_weights_on_model_save",
)  # fmt: skip
# What sets the batches, and is said elsewhere: name -> where.
_SAID_ELSEWHERE = {
    "train_micro_batch_size_per_gpu": "{role}.sequences_per_micro_batch_per_device cuts the micro-batches",
    "train_batch_size": "{role}.sequences_per_mini_batch is what an update learns from",
    "gradient_accumulation_steps": "mini-batch and micro-batch sizes say how many passes an update takes",
    "gradient_clipping": "{role}.optimizer.max_grad_norm is the limit",
}
# name -> what happens instead, where the value is not false.
_WITHOUT_EFFECT = {
    "wall_clock_breakdown": "metrics.jsonl has the seconds of every part of a step",
    "steps_per_print": "the console and metrics.jsonl have every step",
    "checkpoint": "checkpoints are written in one format for all engines",
    "prescale_gradient": "DeepSpeed has no such setting (its word ends in s)",
    "disable_trace_cache": "a trace that does not fit is made anew",
    "offload_after_step": "zero_optimization.offload_optimizer.device=cpu keeps the optimizer's state on the CPU",
}
KNOWN = (
    _ZERO, "bf16", "fp16", "data_types", "communication_data_type", "sequence_parallel_size", *_SAID_ELSEWHERE,
    *_WITHOUT_EFFECT,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroSettings:
    """What is spread over the devices of a role, and where it rests."""

    stage: int = DEFAULT_STAGE
    offload_optimizer: bool = False  # masters, gradients and averages in CPU memory, and the update made there
    offload_param: bool = False  # weights in CPU memory (stage 3)
    pin_memory: bool = False
    second_partition: int = (
        1  # devices that hold a nearer copy of the weights together (hpZ, arXiv:2306.10209); 1: none
    )
    accumulation_dtype: str = "float32"  # in which gradients of micro-batches add up
    reduce_dtype: str = "float32"  # in which they are added up over devices
    handed_on: Mapping[str, Any] = field(default_factory=dict)  # DeepSpeed's own words; a size may be auto

    def spread(self, ranks: int) -> tuple[int, int, int]:
        """Over how many devices weights, gradients and the optimizer's state are spread."""
        return (ranks if self.stage == 3 else 1, ranks if self.stage >= 2 else 1, ranks)

    def section(self, hidden_size: int) -> dict[str, Any]:
        """``zero_optimization`` as DeepSpeed takes it, with no auto left in it."""
        words: dict[str, Any] = {"stage": self.stage}
        for name, value in self.handed_on.items():
            if value != AUTO:
                words[name] = value
            elif name in _OF_HIDDEN_SIZE:
                words[name] = _OF_HIDDEN_SIZE[name](hidden_size)
        if self.stage == 1:
            words["overlap_comm"] = False  # it reduces at the end of an update, when nothing is left to overlap with
        rests = {"device": "cpu", "pin_memory": self.pin_memory}
        words |= {"offload_optimizer": rests} if self.offload_optimizer else {}
        words |= {"offload_param": rests} if self.offload_param else {}
        words |= {"zero_hpz_partition_size": self.second_partition} if self.second_partition > 1 else {}
        return words


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroBytes:
    """Of one device."""

    weights: int
    optimizer: int  # gradients, float32 masters, Adam's averages
    host: int  # in CPU memory instead


def zero_bytes(settings: ZeroSettings, *, parameters: int, trained: int, width: int, ranks: int) -> ZeroBytes:
    """What a model takes (arXiv:1910.02054, section 3.1; arXiv:2306.10209, section 3.2 for the second copy).

    Args: numbers of parameters, and of those that are trained (0: frozen); width of a weight to compute with, in bytes.
    """
    weights_over, gradients_over, state_over = settings.spread(ranks)
    weights = parameters * width // weights_over
    if settings.second_partition > 1:
        weights += parameters * width // settings.second_partition
    gradients = trained * BYTES[settings.accumulation_dtype if width < 4 else "float32"] // gradients_over
    # In float32, parts of weights (stage 3) are their own masters.
    masters = 0 if width == 4 and settings.stage == 3 else trained * 4 // state_over
    state = gradients + masters + trained * 8 // state_over
    off = (weights if settings.offload_param else 0) + (state if settings.offload_optimizer else 0)
    return ZeroBytes(
        weights=0 if settings.offload_param else weights,
        optimizer=0 if settings.offload_optimizer else state,
        host=off,
    )


def zero_settings(
    options: Mapping[str, Any], ranks: int, *, role: str = "policy", compute_dtype: str | None = None
) -> tuple[ZeroSettings, list[Problem], list[str]]:
    """The settings; what is wrong with the options; and what of them has no effect, in sentences.

    Args: ranks of the role; compute_dtype of the run, to compare bf16.enabled with.
    """
    at = f"{role}.engine_options"
    problems: list[Problem] = []
    told: list[str] = []
    problems += _unknown(options, KNOWN, at)
    zero = _section(options, _ZERO, at, problems)
    problems += _unknown(zero, _IN_ZERO, f"{at}.{_ZERO}")
    told += _without_effect(options, role)
    stage = _stage(zero, role, problems)
    _check_precision(options, at, compute_dtype, problems, told)
    offloads = {name: _offload(zero, name, at, problems) for name in _OFFLOADS}
    if offloads["offload_param"] and stage != 3:
        what = f"{at}.{_ZERO}.offload_param keeps weights on the CPU, and ZeRO stage {stage} has all of them on every device"
        problems.append(Problem(what, fix=f"use {at}.{_ZERO}.stage=3", field=f"{at}.{_ZERO}.offload_param"))
    if role == "reference" and offloads["offload_optimizer"]:
        told.append(f"{at}.{_ZERO}.offload_optimizer has no effect: the reference has no optimizer")
    problems += [
        Problem(
            f"{at}.{_ZERO}.{name}: this version does not send rounded numbers",
            fix="use false",
            field=f"{at}.{_ZERO}.{name}",
        )
        for name in _QUANTIZED
        if zero.get(name)
    ]
    if zero.get("stage3_gather_16bit_weights_on_model_save") is False:
        told.append(
            f"{at}.{_ZERO}.stage3_gather_16bit_weights_on_model_save=false has no effect: saved weights are whole"
        )
    if stage == 1 and zero.get("overlap_comm"):
        told.append(f"{at}.{_ZERO}.overlap_comm has no effect with stage 1: gradients are reduced once per update")
    types = _section(options, "data_types", at, problems)
    problems += _unknown(types, ("grad_accum_dtype",), f"{at}.data_types")
    return (
        ZeroSettings(
            stage=stage,
            offload_optimizer=offloads["offload_optimizer"],
            offload_param=offloads["offload_param"],
            pin_memory=any(bool((zero.get(name) or {}).get("pin_memory")) for name in _OFFLOADS if offloads[name]),
            second_partition=_second_partition(zero, stage, ranks, at, problems, told),
            accumulation_dtype=_dtype(types.get("grad_accum_dtype"), f"{at}.data_types.grad_accum_dtype", problems),
            reduce_dtype=_dtype(options.get("communication_data_type"), f"{at}.communication_data_type", problems),
            handed_on=_handed_on(zero, f"{at}.{_ZERO}", problems),
        ),
        problems,
        told,
    )


def _unknown(section: Mapping[str, Any], known: tuple[str, ...], at: str) -> Iterator[Problem]:
    for name in section:
        if name not in known:
            what = f"deepspeed: {at}.{name} is not known here"
            yield Problem(what, fix=did_you_mean(name, known, listed=True), field=f"{at}.{name}")


def _section(options: Mapping[str, Any], name: str, at: str, problems: list[Problem]) -> Mapping[str, Any]:
    value = options.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        problems.append(Problem(f"{at}.{name} holds settings, and is {value!r}", field=f"{at}.{name}"))
        return {}
    return value


def _without_effect(options: Mapping[str, Any], role: str) -> Iterator[str]:
    at = f"{role}.engine_options"
    for name, where in _SAID_ELSEWHERE.items():
        if options.get(name) not in (None, AUTO):
            yield f"{at}.{name} has no effect: {where.format(role=role)}"
    for name, why in _WITHOUT_EFFECT.items():
        if options.get(name):
            yield f"{at}.{name} has no effect: {why}"
    if options.get("sequence_parallel_size") not in (None, 1):
        yield f"{at}.sequence_parallel_size has no effect: policy.sequence_parallel is for both"


def _stage(zero: Mapping[str, Any], role: str, problems: list[Problem]) -> int:
    stage = zero.get("stage", DEFAULT_STAGE)
    if isinstance(stage, bool) or stage not in (1, 2, 3):
        field = f"{role}.engine_options.{_ZERO}.stage"
        what = (
            f"{field} is {stage!r}, and there are the stages 1 (optimizer state), 2 (gradients too) and 3 (weights too)"
        )
        problems.append(Problem(what, fix="use 3, or the engine local on one device for 0", field=field))
        return DEFAULT_STAGE
    return int(stage)


def _check_precision(
    options: Mapping[str, Any], at: str, compute_dtype: str | None, problems: list[Problem], told: list[str]
) -> None:
    if _section(options, "fp16", at, problems).get("enabled"):
        what = f"{at}.fp16.enabled: float16 needs a loss scale, and this version computes in bfloat16 or float32"
        problems.append(Problem(what, fix="use model.compute_dtype=bfloat16", field=f"{at}.fp16.enabled"))
    half = _section(options, "bf16", at, problems)
    problems += _unknown(half, ("enabled",), f"{at}.bf16")
    enabled = half.get("enabled")
    if compute_dtype and enabled not in (None, AUTO) and bool(enabled) != (compute_dtype == "bfloat16"):
        told.append(
            f"{at}.bf16.enabled={str(enabled).lower()} has no effect: model.compute_dtype={compute_dtype} decides"
        )


def _offload(zero: Mapping[str, Any], name: str, at: str, problems: list[Problem]) -> bool:
    section = _section(zero, name, f"{at}.{_ZERO}", problems)
    problems += _unknown(section, ("device", "pin_memory"), f"{at}.{_ZERO}.{name}")
    device, field = section.get("device") or "none", f"{at}.{_ZERO}.{name}.device"
    if device not in ("none", "cpu"):
        what = f"{field} is {device!r}, and what leaves the device goes to the CPU's memory"
        problems.append(Problem(what, fix="use cpu, or none", field=field))
    return bool(device == "cpu")


def _second_partition(
    zero: Mapping[str, Any], stage: int, ranks: int, at: str, problems: list[Problem], told: list[str]
) -> int:
    size, field = zero.get("zero_hpz_partition_size", 1), f"{at}.{_ZERO}.zero_hpz_partition_size"
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        problems.append(Problem(f"{field} counts devices, and is {size!r}", fix="use 1 for none", field=field))
        return 1
    if size == 1:
        return 1
    if stage != 3:
        told.append(f"{field} has no effect with stage {stage}: every device has all weights")
        return 1
    if ranks % size:
        fits = [each for each in range(1, ranks + 1) if ranks % each == 0]
        near = min(fits, key=lambda each: abs(each - size))
        what = f"{ranks} devices do not split into groups of {size} that hold a second copy of the weights"
        problems.append(Problem(what, fix=f"use {field}={near}", field=field))
        return 1
    return size


def _handed_on(zero: Mapping[str, Any], at: str, problems: list[Problem]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in _SWITCHES:
        value = zero.get(name)
        if value is None:
            continue
        if not isinstance(value, bool):
            problems.append(Problem(f"{at}.{name} is {value!r}, and is true or false", field=f"{at}.{name}"))
        else:
            found[name] = value
    for name in _SIZES:
        value = zero.get(name)
        if value is None:
            continue
        if value == AUTO:
            found[name] = AUTO
        elif isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
            what = f"{at}.{name} counts elements, and is {value!r}"
            problems.append(Problem(what, fix="use a whole number, or auto", field=f"{at}.{name}"))
        else:
            found[name] = int(value)  # YAML reads 5e8 as a fraction
    return found


def _dtype(asked: Any, field: str, problems: list[Problem]) -> str:
    if asked is None:
        return "float32"
    if str(asked) not in _DTYPES:
        problems.append(Problem(f"{field}={asked}: no such precision here", fix="use fp32, or bf16", field=field))
        return "float32"
    return _DTYPES[str(asked)]
