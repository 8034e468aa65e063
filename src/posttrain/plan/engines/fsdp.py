"""The engine fsdp: torch's ``fully_shard`` (FSDP2) shards weights, gradients and optimizer state over devices.

Its options are in the words of FSDP1, FSDP2 and the dialects. They are read here once, so that a plan can be checked and
priced; the engine takes the settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from posttrain.config.base import Section
from posttrain.config.process_reward import PROCESS_REFERENCE
from posttrain.errors import Problem
from posttrain.plan.engine import EnginePlan, Learner, Passes, PlacedModel
from posttrain.plan.memory import ADAM, AVERAGES, BYTES, RoleMemory
from posttrain.plan.model_shape import ModelShape
from posttrain.plan.options import Options, Reading, ignored, ignored_options, option, read_options
from posttrain.plan.traffic import Traffic, gather
from posttrain.registry import ENGINE_PLANS

Precision = Literal["bf16", "bfloat16", "torch.bfloat16", "fp32", "float32", "torch.float32"]
_PRECISION = "use bf16 or fp32"
_TILES = "model.gradient_checkpointing bounds what an MLP keeps"


class OpenSection(Options):
    """A section of a peer whose other names are reported and have no effect."""

    model_config = ConfigDict(extra="allow")


class WrapPolicy(OpenSection):
    """Units of parameters that are gathered together."""

    disable: bool = False
    """Gather everything at once."""
    min_num_params: int = Field(default=0, ge=0)
    """Above 0, units are modules of at least this many parameters, whatever their class."""
    transformer_layer_cls_to_wrap: str | list[str] | None = None
    """Classes of the units; null: as the model says."""


class MixedPrecision(OpenSection):
    """Precision of what travels, where param_dtype and reduce_dtype do not say it."""

    param_dtype: Precision | None = option(None, fix=_PRECISION)
    """Precision of gathered weights."""
    reduce_dtype: Precision | None = option(None, fix=_PRECISION)
    """Precision in which gradients are added up over devices."""
    buffer_dtype: Any = ignored("buffers keep the precision the model gives them")


class FsdpOptions(Options):
    """Options of the training engine fsdp."""

    fsdp_size: int | None = option(None, ge=-1, fix="use -1 for all")
    """Devices that keep one copy of the weights together; null, or below 1: all of the role's."""
    reshard_after_forward: bool | int | None = option(None, fix="use true")
    """Shard weights again after the forward pass (true), or to groups of so many devices, or keep them gathered (false)."""
    forward_prefetch: bool = False
    """Gather the next layer while one computes."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in CPU memory (SkyRL's and ROLL's word)."""
    offload_policy: bool = False
    """Keep parameters, gradients and optimizer state in CPU memory (verl's word)."""
    offload_params: bool = False
    """Takes effect with cpu_offload only, which moves parameters as well."""
    param_offload: bool = False
    """Keep weights in CPU memory while other models work on the device."""
    optimizer_offload: bool = False
    """Keep the optimizer's averages in CPU memory between updates (verl's word)."""
    offload_after_step: bool = False
    """Keep the optimizer's averages in CPU memory between updates (SkyRL's word)."""
    param_dtype: Precision | None = option(None, fix=_PRECISION)
    """Precision of gathered weights; null: model.compute_dtype."""
    reduce_dtype: Precision | None = option(None, fix=_PRECISION)
    """Precision in which gradients are added up over devices; null: float32."""
    mixed_precision: MixedPrecision = option(MixedPrecision(), fix="write settings below it, such as reduce_dtype")
    """The same in a section."""
    wrap_policy: WrapPolicy = option(WrapPolicy(), fix="write settings below it, such as min_num_params")
    """Choice of the units of parameters that are gathered one after another."""
    ep_size: int = 1
    """Devices that share experts; 1 is accepted."""
    efsdp_size: int = 1
    """Devices that share one expert; 1 is accepted."""
    moe_use_grouped_mm: Any = ignored("experts run as the model's own code runs them")
    use_orig_params: Any = ignored("FSDP2 always keeps the parameters as the model has them")
    grad_offload: Any = ignored("gradients leave with offload_policy; otherwise an update takes them at once")
    use_batched_model_update: Any = ignored("weights always go to the sampler in buckets (rollout.weight_bucket_mib)")
    reduce_scatter_during_grad_accumulation: Any = ignored(
        "gradients are reduced at every micro-batch, so that only parts are held"
    )
    async_save_ckpt: Any = ignored("a checkpoint is complete before the run continues")
    save_only_model: Any = ignored("checkpoint.save_optimizer says what is saved")
    apply_tiled_mlp: Any = ignored(_TILES)
    tiled_num_shards: Any = ignored(_TILES)


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpSettings:
    """Sharding of a model, and the place of its shards."""

    shard: int  # ranks that keep one copy together
    replicas: int = 1  # such groups, with equal shards: hybrid sharding
    # False: stay gathered until the backward pass; a number: in groups of so many
    reshard_after_forward: bool | int = True
    cpu_offload: bool = False  # shards, gradients and optimizer in CPU memory
    param_offload: bool = False  # shards in CPU memory while other models work on the device
    optimizer_offload: bool = False  # the optimizer's averages in CPU memory between updates
    forward_prefetch: bool = False  # gather the next layer while one computes
    layers: tuple[str, ...] | None = (
        None  # classes of the units that are gathered one at a time; None: as the model says
    )
    smallest_unit: int = 0  # parameters; above 0 units are modules of at least so many, whatever their class
    one_unit: bool = False  # gather everything at once
    param_dtype: str | None = None  # of gathered weights; None: model.compute_dtype
    reduce_dtype: str = "float32"  # in which gradients are added up over ranks


def fsdp_settings(options: Mapping[str, Any], ranks: int, *, role: str = "policy") -> Reading[FsdpSettings]:
    """Read a role's options. Args: ranks of the role."""
    at = f"{role}.engine_options"
    given, problems = read_options(FsdpOptions, options, at=at, engine="fsdp")
    warnings = [*ignored_options(given, at=at, role=role)]
    for name, section in (("wrap_policy", given.wrap_policy), ("mixed_precision", given.mixed_precision)):
        warnings += ignored_options(section, at=f"{at}.{name}", role=role)
        warnings += [f"{at}.{name}.{key} has no effect: fsdp does not read it" for key in section.model_extra or ()]
    problems += [
        Problem(f"{name}={size}: fsdp does not split experts", fix=f"use {at}.{name}=1", field=f"{at}.{name}")
        for name, size in (("ep_size", given.ep_size), ("efsdp_size", given.efsdp_size))
        if size != 1
    ]
    shard = _shard(given, ranks, at, problems)
    keeps_off, leaves = _offload(given, at, warnings, frozen=role in ("reference", PROCESS_REFERENCE))
    layers, precision = given.wrap_policy.transformer_layer_cls_to_wrap, given.mixed_precision
    settings = FsdpSettings(
        shard=shard,
        replicas=ranks // shard,
        reshard_after_forward=_reshard(given, shard, at, problems),
        cpu_offload=keeps_off,
        param_offload=leaves,
        optimizer_offload=given.optimizer_offload or given.offload_after_step,
        forward_prefetch=given.forward_prefetch,
        layers=(layers,) if isinstance(layers, str) else tuple(layers) if layers else None,
        smallest_unit=given.wrap_policy.min_num_params,
        one_unit=given.wrap_policy.disable,
        param_dtype=_dtype(given.param_dtype or precision.param_dtype),
        reduce_dtype=_dtype(given.reduce_dtype or precision.reduce_dtype) or "float32",
    )
    return Reading(settings, problems, warnings)


def _dtype(precision: Precision | None) -> str | None:
    return None if precision is None else "bfloat16" if precision.endswith(("bf16", "bfloat16")) else "float32"


def _shard(given: FsdpOptions, ranks: int, at: str, problems: list[Problem]) -> int:
    size = given.fsdp_size
    if size is None or size < 1 or size >= ranks:
        return ranks
    if ranks % size:
        fits = [each for each in range(1, ranks + 1) if ranks % each == 0]
        near = min(fits, key=lambda each: abs(each - size))
        what = f"{ranks} devices do not split into groups of {size} that keep one copy of the weights"
        problems.append(Problem(what, fix=f"use {at}.fsdp_size={near}, or -1 for all", field=f"{at}.fsdp_size"))
        return ranks
    return size


def _reshard(given: FsdpOptions, shard: int, at: str, problems: list[Problem]) -> bool | int:
    """Return true, false, or a divisor of the shard group; the whole group is true."""
    wanted, field = given.reshard_after_forward, f"{at}.reshard_after_forward"
    if wanted is None or isinstance(wanted, bool):
        return wanted is None or wanted
    if wanted < 1 or shard % wanted:
        what = f"{field}={wanted!r} is neither true nor false nor a divisor of the {shard} devices that keep one copy"
        problems.append(Problem(what, fix="use true", field=field))
        return True
    return {shard: True, 1: False}.get(wanted, wanted)  # sharded over one device is not sharded


def _offload(given: FsdpOptions, at: str, warnings: list[str], *, frozen: bool) -> tuple[bool, bool]:
    """Return whether a model is always in CPU memory, and whether its weights go there while others work.

    Without an optimizer to come back to, the two are the same for a frozen model.
    """
    names = ("offload_policy", "cpu_offload", *(("param_offload",) if frozen else ()))
    always = [name for name in names if getattr(given, name)]
    leaves = given.param_offload and not frozen
    if leaves and always:
        warnings.append(f"{at}.param_offload has no effect: {always[0]} keeps the weights on the CPU always")
    if given.offload_params and not always:
        why = "cpu_offload takes parameters, gradients and optimizer together, and is off"
        warnings.append(f"{at}.offload_params has no effect: {why}")
    return bool(always), leaves and not always


@ENGINE_PLANS.register("fsdp")
class FsdpPlan(EnginePlan):
    """Shards over devices."""

    options: ClassVar[type[Section] | None] = FsdpOptions
    peer_names: ClassVar[tuple[str, ...]] = ("fsdp", "fsdp2")
    shares_out: ClassVar[bool] = True
    shards_any: ClassVar[bool] = True
    moves_reference: ClassVar[bool] = True
    replays_experts: ClassVar[bool] = True
    balances_experts: ClassVar[bool] = True
    scores_responses: ClassVar[bool] = True
    scales_losses: ClassVar[bool] = True
    optimizers: ClassVar[tuple[str, ...]] = ("adamw", "sgd", "muon")
    splits_sequences: ClassVar[bool] = True
    reads_images: ClassVar[bool] = True

    def shard(self, options: Mapping[str, Any], ranks: int) -> int:
        return fsdp_settings(options, ranks).settings.shard

    def shardings(self, devices_per_node: int) -> tuple[Mapping[str, Any], ...]:
        """Shard over all devices, which takes the least memory; or within a node, so that only gradients cross the network."""
        return {"fsdp_size": -1}, {"fsdp_size": devices_per_node}

    def rests(self, section: Learner) -> tuple[str, ...]:
        settings = fsdp_settings(section.engine_options, 1).settings
        optimizer = settings.optimizer_offload or section.optimizer.offload
        return (*(("weights",) if settings.param_offload else ()), *(("optimizer",) if optimizer else ()))

    def offloaded(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**options, "cpu_offload": True}

    def option_problems(self, options: Mapping[str, Any], ranks: int, role: str) -> list[Problem]:
        return fsdp_settings(options, ranks, role=role).problems

    def option_warnings(self, options: Mapping[str, Any], devices: int, role: str, compute_dtype: str) -> Iterator[str]:
        yield from fsdp_settings(options, devices, role=role).warnings

    def trained_memory(self, model: PlacedModel, *, trained: int, activations: int) -> RoleMemory:
        """Shards are their own masters."""
        settings, width = _settings(model), model.master_width
        shards = model.shape.parameters * width // settings.shard
        state = trained * (ADAM - AVERAGES + model.averages) * width // settings.shard
        off = settings.cpu_offload
        return RoleMemory(
            role=model.role,
            weights=0 if off else shards,
            optimizer=0 if off else state,
            gathered=_gathered(settings, model.shape, model.width),
            activations=activations,
            host=shards + state if off else 0,
        )

    def frozen_memory(self, model: PlacedModel) -> RoleMemory:
        settings = _settings(model)
        shards = model.shape.parameters * model.width // settings.shard
        return RoleMemory(
            role=model.role,
            weights=0 if settings.cpu_offload else shards,
            gathered=_gathered(settings, model.shape, model.width),
            host=shards if settings.cpu_offload else 0,
        )

    def update_traffic(self, model: PlacedModel, passes: Passes) -> list[Traffic]:
        settings, weights = _settings(model), model.shape.parameters * model.width
        units, times = _units(settings, model.shape), passes.forward
        forward_and_back = (settings.shard, _regathered(settings))
        return [
            gather(f"{model.role}: gather weights", weights, forward_and_back, units=units, times=times),
            _reduce(f"{model.role}: reduce gradients", settings, model.shape, times),
        ]

    def scoring_traffic(self, model: PlacedModel, purpose: str, passes: Passes) -> list[Traffic]:
        settings, weights = _settings(model), model.shape.parameters * model.width
        units = _units(settings, model.shape)
        return [gather(f"{purpose}: gather weights", weights, [settings.shard], units=units, times=passes.forward)]


def _settings(model: PlacedModel) -> FsdpSettings:
    return fsdp_settings(model.options, model.ranks, role=model.role).settings


def _gathered(settings: FsdpSettings, shape: ModelShape, width: int) -> int:
    """Count the bytes of whole weights at once: two layers (one computes, one arrives) and the rest of the model, or all."""
    if settings.shard == 1:
        # A rounded copy of the masters.
        return shape.parameters * width if width < BYTES["float32"] else 0
    if settings.one_unit or settings.reshard_after_forward is False:
        return shape.parameters * width
    return (2 * shape.layer_parameters + shape.outer_parameters) * width


def _units(settings: FsdpSettings, shape: ModelShape) -> int:
    """Count the groups of parameters that travel together: the layers, and the rest."""
    return 1 if settings.one_unit else shape.layers + 1


def _regathered(settings: FsdpSettings) -> int:
    """Count the devices from which the backward pass gathers every layer again; 1: it is still there."""
    if settings.one_unit or settings.reshard_after_forward is False:
        return 1
    return settings.shard if settings.reshard_after_forward is True else int(settings.reshard_after_forward)


def _reduce(what: str, settings: FsdpSettings, shape: ModelShape, times: int) -> Traffic:
    shard, replicas, width = settings.shard, settings.replicas, BYTES[settings.reduce_dtype]
    within = shape.parameters * width * (shard - 1) // shard
    between = 2 * shape.parameters * width * (replicas - 1) // (replicas * shard)
    kinds = (shard > 1) + (replicas > 1)
    return Traffic(
        what=what,
        bytes=times * (within + between),
        messages=times * kinds * _units(settings, shape),
        within="replica" if replicas > 1 else "shard",
    )
