"""The engine deepspeed: DeepSpeed's ZeRO spreads a model over devices; its options are in DeepSpeed's own words.

ZeRO (arXiv:1910.02054) spreads the optimizer's state over the devices (stage 1), gradients too (2), weights too (3). Options are
read here once, so that a plan can be checked and priced; the engine takes the settings. Nothing reaches DeepSpeed unread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, Strict

from posttrain.config import TrainingConfig
from posttrain.config.base import Section
from posttrain.errors import Problem
from posttrain.plan.engine import EnginePlan, Learner, Learners, Passes, PlacedModel
from posttrain.plan.memory import BYTES, RoleMemory
from posttrain.plan.options import AUTO, Options, Reading, ignored, ignored_options, option, read_options
from posttrain.plan.traffic import Traffic, gather
from posttrain.registry import ENGINE_PLANS

# auto, as transformers resolves it: from the hidden size h. Other sizes that are auto are DeepSpeed's own defaults.
_OF_HIDDEN_SIZE = {
    "reduce_bucket_size": lambda h: h * h,
    "stage3_prefetch_bucket_size": lambda h: int(0.9 * h * h),
    "stage3_param_persistence_threshold": lambda h: 10 * h,
}
Precision = Literal["fp32", "float32", "bf16", "bfloat16"]
Size = Annotated[int, Field(ge=0)] | Literal["auto"] | None
Switch = Annotated[bool, Strict()] | None
_PRECISION = "use fp32, or bf16"
_SIZE = "use a whole number, or auto"


class Offload(Options):
    """Place of an offloaded part of the state."""

    device: Literal["none", "cpu"] = option("none", fix="use cpu, or none: what leaves the device goes to CPU memory")
    """Memory in which it rests; none: it stays on the device."""
    pin_memory: bool = False
    """Use pinned memory there."""


class HandedOn(Options):
    """Settings passed unchanged to DeepSpeed, in zero_optimization."""

    allgather_partitions: Switch = None
    """Gather updated weights of stages 1 and 2 in one operation."""
    overlap_comm: Switch = None
    """Overlap the reduction of gradients with the backward pass; stages 2 and 3."""
    reduce_scatter: Switch = None
    """Reduce gradients to the device that keeps them, not to all."""
    contiguous_gradients: Switch = None
    """Copy gradients into one buffer as they come."""
    round_robin_gradients: Switch = None
    """Spread the copying of gradients to CPU memory."""
    allgather_bucket_size: Size = option(None, fix=_SIZE)
    """Elements gathered at a time."""
    reduce_bucket_size: Size = option(None, fix=_SIZE)
    """Elements reduced at a time. auto: h x h, of hidden size h."""
    sub_group_size: Size = option(None, fix=_SIZE)
    """Elements updated at a time."""
    stage3_prefetch_bucket_size: Size = option(None, fix=_SIZE)
    """Elements fetched ahead. auto: 0.9 x h x h."""
    stage3_param_persistence_threshold: Size = option(None, fix=_SIZE)
    """Weights of fewer elements stay gathered. auto: 10 x h."""
    stage3_max_live_parameters: Size = option(None, fix=_SIZE)
    """Elements gathered at most."""
    stage3_max_reuse_distance: Size = option(None, fix=_SIZE)
    """Weights used again within so many elements stay gathered."""


class ZeroOptimization(HandedOn):
    """DeepSpeed's section zero_optimization."""

    stage: Literal[1, 2, 3] = option(3, fix="use 3; what 0 does, one device does")
    """State that is spread over devices: 1 the optimizer's, 2 gradients too, 3 weights too."""
    offload_optimizer: Offload = Offload()
    """Masters, gradients and averages in CPU memory, and the update made there."""
    offload_param: Offload = Offload()
    """Weights in CPU memory; stage 3."""
    zero_hpz_partition_size: Annotated[int, Strict(), Field(ge=1)] = option(1, fix="use 1 for none")
    """Devices that hold a second, nearer copy of the weights together (hpZ, arXiv:2306.10209); 1: none."""
    zero_quantized_weights: bool = False
    """Gather rounded weights; false is accepted."""
    zero_quantized_gradients: bool = False
    """Reduce rounded gradients; false is accepted."""
    zero_quantized_nontrainable_weights: bool = False
    """Gather rounded frozen weights; false is accepted."""
    stage3_gather_16bit_weights_on_model_save: bool = True
    """True is accepted: saved weights are whole."""


class HalfPrecision(Options):
    """DeepSpeed's section bf16."""

    enabled: bool | Literal["auto"] | None = None
    """No effect: model.compute_dtype decides."""


class Float16(Options):
    """DeepSpeed's section fp16, whose other names are read only when it is enabled."""

    model_config = ConfigDict(extra="allow")

    enabled: bool | Literal["auto"] | None = None
    """False is accepted."""


class DataTypes(Options):
    """DeepSpeed's section data_types."""

    grad_accum_dtype: Precision | None = option(None, fix=_PRECISION)
    """Precision in which gradients of micro-batches add up; null: float32."""


class DeepspeedOptions(Options):
    """Options of the training engine deepspeed."""

    zero_optimization: ZeroOptimization = ZeroOptimization()
    """ZeRO."""
    bf16: HalfPrecision = HalfPrecision()
    """Compared with model.compute_dtype, which decides."""
    fp16: Float16 = Float16()
    """Unsupported: it needs a loss scale."""
    data_types: DataTypes = DataTypes()
    """Precision of gradients."""
    communication_data_type: Precision | None = option(None, fix=_PRECISION)
    """Precision in which gradients are added up over devices; null: float32."""
    sequence_parallel_size: int | None = None
    """No effect: the role's sequence_parallel decides."""
    train_micro_batch_size_per_gpu: Any = ignored("{role}.sequences_per_micro_batch_per_device cuts the micro-batches")
    train_batch_size: Any = ignored("{role}.sequences_per_mini_batch is what an update learns from")
    gradient_accumulation_steps: Any = ignored("mini-batch and micro-batch sizes say how many passes an update takes")
    gradient_clipping: Any = ignored("{role}.optimizer.max_grad_norm is the limit")
    wall_clock_breakdown: Any = ignored("metrics.jsonl has the seconds of every part of a step")
    steps_per_print: Any = ignored("the console and metrics.jsonl have every step")
    checkpoint: Any = ignored("checkpoints are written in one format for all engines")
    prescale_gradient: Any = ignored("DeepSpeed has no such setting (its word ends in s)")
    disable_trace_cache: Any = ignored("an invalid trace is always recorded again")
    offload_after_step: Any = ignored(
        "zero_optimization.offload_optimizer.device=cpu keeps the optimizer's state on the CPU"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroSettings:
    """Sharding of ZeRO over the devices of a role, and its offloading."""

    stage: int = 3
    offload_optimizer: bool = False  # masters, gradients and averages in CPU memory, and the update made there
    offload_param: bool = False  # weights in CPU memory (stage 3)
    pin_memory: bool = False
    second_partition: int = 1  # devices that hold a nearer copy of the weights together (hpZ); 1: none
    accumulation_dtype: str = "float32"  # in which gradients of micro-batches add up
    reduce_dtype: str = "float32"  # in which they are added up over devices
    # DeepSpeed's own words; a size may be auto.
    handed_on: Mapping[str, Any] = field(default_factory=dict)

    def spread(self, ranks: int) -> tuple[int, int, int]:
        """Return over how many devices weights, gradients and the optimizer's state are spread."""
        return (ranks if self.stage == 3 else 1, ranks if self.stage >= 2 else 1, ranks)

    def section(self, hidden_size: int) -> dict[str, Any]:
        """Return ``zero_optimization`` as DeepSpeed takes it, with no auto left in it."""
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
    """Memory of one device."""

    weights: int
    optimizer: int  # gradients, float32 masters, Adam's averages
    host: int  # in CPU memory instead


def zero_bytes(settings: ZeroSettings, *, parameters: int, trained: int, width: int, ranks: int) -> ZeroBytes:
    """Count the bytes that a model takes (arXiv:1910.02054, section 3.1; arXiv:2306.10209, section 3.2 for the second copy).

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
) -> Reading[ZeroSettings]:
    """Read a role's options. Args: ranks of the role; compute_dtype of the run, to compare bf16.enabled with."""
    at = f"{role}.engine_options"
    given, problems = read_options(DeepspeedOptions, options, at=at, engine="deepspeed")
    zero = given.zero_optimization
    problems += _problems(given, at)
    off = [each for each in (zero.offload_optimizer, zero.offload_param) if each.device == "cpu"]
    settings = ZeroSettings(
        stage=zero.stage,
        offload_optimizer=zero.offload_optimizer.device == "cpu",
        offload_param=zero.offload_param.device == "cpu",
        pin_memory=any(each.pin_memory for each in off),
        second_partition=_second_partition(zero, ranks, at, problems),
        accumulation_dtype=_dtype(given.data_types.grad_accum_dtype),
        reduce_dtype=_dtype(given.communication_data_type),
        handed_on={name: value for name in HandedOn.model_fields if (value := getattr(zero, name)) is not None},
    )
    return Reading(settings, problems, [*_warnings(given, at, role, compute_dtype)])


def _dtype(precision: Precision | None) -> str:
    return "bfloat16" if precision in ("bf16", "bfloat16") else "float32"


def _problems(given: DeepspeedOptions, at: str) -> Iterator[Problem]:
    zero, in_zero = given.zero_optimization, f"{at}.zero_optimization"
    if given.fp16.enabled:
        what = f"{at}.fp16.enabled: float16 needs a loss scale, and this version computes in bfloat16 or float32"
        yield Problem(what, fix="use model.compute_dtype=bfloat16", field=f"{at}.fp16.enabled")
    if zero.offload_param.device == "cpu" and zero.stage != 3:
        what = f"{in_zero}.offload_param keeps weights on the CPU, and ZeRO stage {zero.stage} has all of them on every device"
        yield Problem(what, fix=f"use {in_zero}.stage=3", field=f"{in_zero}.offload_param")
    for name in ZeroOptimization.model_fields:
        if name.startswith("zero_quantized") and getattr(zero, name):
            what = f"{in_zero}.{name}: this version does not send rounded numbers"
            yield Problem(what, fix="use false", field=f"{in_zero}.{name}")


def _warnings(given: DeepspeedOptions, at: str, role: str, compute_dtype: str | None) -> Iterator[str]:
    zero, in_zero = given.zero_optimization, f"{at}.zero_optimization"
    yield from ignored_options(given, at=at, role=role)
    if given.sequence_parallel_size not in (None, 1):
        yield f"{at}.sequence_parallel_size has no effect: policy.sequence_parallel is for both"
    enabled = given.bf16.enabled
    if compute_dtype and enabled not in (None, AUTO) and bool(enabled) != (compute_dtype == "bfloat16"):
        shown = str(enabled).lower()
        yield f"{at}.bf16.enabled={shown} has no effect: model.compute_dtype={compute_dtype} decides"
    if role == "reference" and zero.offload_optimizer.device == "cpu":
        yield f"{in_zero}.offload_optimizer has no effect: the reference has no optimizer"
    if not zero.stage3_gather_16bit_weights_on_model_save:
        yield f"{in_zero}.stage3_gather_16bit_weights_on_model_save=false has no effect: saved weights are whole"
    if zero.stage == 1 and zero.overlap_comm:
        yield f"{in_zero}.overlap_comm has no effect with stage 1: gradients are reduced once per update"
    if zero.stage != 3 and zero.zero_hpz_partition_size > 1:
        yield f"{in_zero}.zero_hpz_partition_size has no effect with stage {zero.stage}: every device has all weights"


def _second_partition(zero: ZeroOptimization, ranks: int, at: str, problems: list[Problem]) -> int:
    size, field = zero.zero_hpz_partition_size, f"{at}.zero_optimization.zero_hpz_partition_size"
    if zero.stage != 3:
        return 1
    if ranks % size:
        fits = [each for each in range(1, ranks + 1) if ranks % each == 0]
        near = min(fits, key=lambda each: abs(each - size))
        what = f"{ranks} devices do not split into groups of {size} that hold a second copy of the weights"
        problems.append(Problem(what, fix=f"use {field}={near}", field=field))
        return 1
    return size


@ENGINE_PLANS.register("deepspeed")
class DeepspeedPlan(EnginePlan):
    """ZeRO."""

    options: ClassVar[type[Section] | None] = DeepspeedOptions
    library: ClassVar[str | None] = "deepspeed"
    peer_names: ClassVar[tuple[str, ...]] = ("deepspeed",)
    shares_out: ClassVar[bool] = True
    moves_reference: ClassVar[bool] = True
    splits_sequences: ClassVar[bool] = True
    reads_images: ClassVar[bool] = True
    saves_parts: ClassVar[bool] = False  # a process has stretches of all weights in a row, no parts of tensors

    def shard(self, options: Mapping[str, Any], ranks: int) -> int:
        return zero_settings(options, ranks).settings.spread(ranks)[0]

    def rests(self, section: Learner) -> tuple[str, ...]:
        return ()  # ZeRO's own offloading takes the place of optimizer.offload

    def offloaded(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        zero = {**(options.get("zero_optimization") or {}), "offload_param": {"device": "cpu"}}
        return {**options, "zero_optimization": zero}

    def option_problems(self, options: Mapping[str, Any], ranks: int, role: str) -> list[Problem]:
        return zero_settings(options, ranks, role=role).problems

    def option_warnings(self, options: Mapping[str, Any], devices: int, role: str, compute_dtype: str) -> Iterator[str]:
        yield from zero_settings(options, devices, role=role, compute_dtype=compute_dtype).warnings

    def warnings(self, config: TrainingConfig, learners: Learners) -> Iterator[str]:
        """Yield settings of all engines that DeepSpeed has its own ways for."""
        if config.model.master_dtype != "float32":
            yield f"model.master_dtype={config.model.master_dtype} has no effect with deepspeed: its masters are float32"
        for role, section in learners:
            if section.optimizer.offload:
                yield (
                    f"{role}.optimizer.offload has no effect with deepspeed: "
                    f"{role}.engine_options.zero_optimization.offload_optimizer.device=cpu keeps its state on the CPU"
                )

    def trained_memory(self, model: PlacedModel, *, trained: int, activations: int) -> RoleMemory:
        return _memory(model, trained=trained, activations=activations)

    def frozen_memory(self, model: PlacedModel) -> RoleMemory:
        return _memory(model, trained=0, activations=0)

    def update_traffic(self, model: PlacedModel, passes: Passes) -> list[Traffic]:
        """Stage 3 gathers weights for every pass and stages 1 and 2 after every update; stage 1 reduces gradients once per
        update, the others in every pass."""
        ranks, name, units = model.ranks, model.role, model.shape.layers + 1
        if ranks == 1:
            return []
        settings = zero_settings(model.options, ranks, role=name).settings
        weights = model.shape.parameters * model.width
        gradients = model.shape.parameters * BYTES[settings.reduce_dtype] * (ranks - 1) // ranks
        times = passes.updates if settings.stage == 1 else passes.forward
        reduced = Traffic(
            what=f"{name}: reduce gradients", bytes=times * gradients, messages=times * units, within="data"
        )
        if settings.stage < 3:
            sent = passes.updates * weights * (ranks - 1) // ranks
            gathered = Traffic(what=f"{name}: gather new weights", bytes=sent, messages=passes.updates, within="data")
            return [reduced, gathered]
        # The way back reads the second copy.
        near = settings.second_partition if settings.second_partition > 1 else ranks
        return [gather(f"{name}: gather weights", weights, (ranks, near), units=units, times=passes.forward), reduced]

    def scoring_traffic(self, model: PlacedModel, purpose: str, passes: Passes) -> list[Traffic]:
        """Weights that stage 3 has spread are gathered layer by layer."""
        shard, weights = model.place.sizes.shard, model.shape.parameters * model.width
        if shard == 1:
            return []
        units = model.shape.layers + 1
        return [gather(f"{purpose}: gather weights", weights, [shard], units=units, times=passes.forward)]


def _memory(model: PlacedModel, *, trained: int, activations: int) -> RoleMemory:
    ranks, shape, width = model.ranks, model.shape, model.width
    settings = zero_settings(model.options, ranks, role=model.role).settings
    held = zero_bytes(settings, parameters=shape.parameters, trained=trained, width=width, ranks=ranks)
    whole = (2 * shape.layer_parameters + shape.outer_parameters) * width if settings.stage == 3 and ranks > 1 else 0
    return RoleMemory(
        role=model.role,
        weights=held.weights,
        optimizer=held.optimizer,
        gathered=whole,
        activations=activations,
        host=held.host,
    )
