"""What a run needs of each device's memory, estimated from the models' config.json and the sizes of a step. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.config import RunConfig, SftConfig, TrainingConfig
from posttrain.config.critic import CriticConfig
from posttrain.config.policy import LearnerConfig
from posttrain.config.roles import learner_of
from posttrain.plan.megatron import megatron_settings
from posttrain.plan.model_shape import ModelShape, read_shape
from posttrain.plan.placement import PHASES, Phase, PlacementPlan, RolePlacement
from posttrain.plan.roles import sharing_options
from posttrain.plan.sharding import FsdpSettings, fsdp_settings
from posttrain.plan.zero import zero_bytes, zero_settings
from posttrain.records.plans import BatchPlan, CriticBatchPlan, SftBatchPlan

BYTES = {"float32": 4, "bfloat16": 2}
AVERAGES = 2  # values per trained weight that Adam keeps
ADAM = 1 + AVERAGES  # values per trained weight: the gradient and Adam's two averages, in the dtype of the masters
# Weights of an adapter on all linear layers, per layer, hidden unit and rank: in + out of four attention matrices (7) and of
# an MLP four times as wide (15).
ADAPTER = 22
# Activations that the backward pass of one layer needs, in values per token and hidden unit: the inputs of attention,
# projections and products of the MLP (arXiv:2205.05198, section 4.1, without dropout and without the attention matrix).
ACTIVATIONS = 17


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMemory:
    """Bytes on each device of a role. Estimates: good to tell 10 GiB from 20, not 10 from 11."""

    role: str
    weights: int  # held here all the time, unless they rest
    optimizer: int = 0  # gradients, float32 masters, Adam's averages
    gathered: int = 0  # other devices' weights, while they are computed with
    activations: int = 0
    cache: int = 0  # keys and values of the sampler
    host: int = 0  # in CPU memory instead

    def used(self, phase: Phase) -> int:
        """Bytes while it works: only an update keeps activations for a backward pass."""
        working = self.activations if phase == "update" else 0
        return self.weights + self.optimizer + self.gathered + self.cache + working

    def kept(self, rests: tuple[str, ...]) -> int:
        """Bytes that stay while another role works."""
        return (
            (0 if "weights" in rests else self.weights)
            + (0 if "optimizer" in rests else self.optimizer)
            + (0 if "cache" in rests else self.cache)
        )


@dataclass(frozen=True, slots=True)
class Peak:
    """The fullest device, when it is fullest."""

    device: int
    phase: Phase
    bytes: int


def estimate(config: RunConfig, batches: BatchPlan, plan: PlacementPlan) -> list[RoleMemory] | None:
    """Bytes per device for every role whose model can be looked at; None when the policy's cannot (a hub id)."""
    policy = read_shape(config.model.path)
    if policy is None:
        return None
    paths = {"critic": config.critic.path, "reference": config.reference.path}
    if config.reward.model is not None:
        paths["reward model"] = config.reward.model.path
    found = []
    for place in plan.roles:
        path = paths.get(place.role)
        shape = read_shape(path) if path else policy
        if shape is not None and place.ranks:
            found.append(role_memory(config, batches, place, shape))
    return found


def estimate_sft(config: SftConfig, batches: SftBatchPlan, plan: PlacementPlan) -> list[RoleMemory] | None:
    """The same for supervised fine-tuning."""
    shape = read_shape(config.model.path)
    if shape is None:
        return None
    return [_trained(config, batches, place, shape, config.data.max_tokens) for place in plan.roles]


def peak(plan: PlacementPlan, memory: list[RoleMemory]) -> Peak:
    """Where and when most is held: what awake roles use, and what the others have left there."""
    by_role = {each.role: each for each in memory}
    found = []
    for pool in plan.pools:
        here = [(role, by_role[role.role]) for role in plan.roles if role.role in pool.roles and role.role in by_role]
        kept = sum(size.kept(role.rests) for role, size in here)
        for phase in PHASES:
            # Roles on a device work one at a time, also two that are awake in the same phase.
            extra = [size.used(phase) - size.kept(role.rests) for role, size in here if phase in role.awake]
            found.append(Peak(pool.devices[0], phase, kept + max(extra, default=0)))
    return max(found, key=lambda each: each.bytes)


def role_memory(config: RunConfig, batches: BatchPlan, place: RolePlacement, shape: ModelShape) -> RoleMemory:
    """Bytes on each device of one role, for a model of this shape."""
    width = BYTES[config.model.compute_dtype]
    split = place.sizes.tensor * place.sizes.pipeline  # sequence-parallel ranks hold all of a layer
    if place.role == "rollout":
        slots = min(config.rollout.max_concurrent_sequences, -(-batches.sequences_per_step // place.copies))
        tokens = slots * (config.context_tokens + config.rollout.max_response_tokens)
        return RoleMemory(
            role=place.role,
            weights=0 if place.uses_weights_of else shape.parameters * width // split,
            cache=tokens * 2 * shape.layers * shape.key_value_width * width // split,
        )
    if place.role in ("reference", "reward model"):
        if place.uses_weights_of:
            return RoleMemory(role=place.role, weights=0)
        if place.engine == "fsdp":
            return _scored_by_fsdp(config, place, shape)
        if place.engine == "deepspeed":
            return _by_zero(config, place, shape, trained=0, activations=0)
        return RoleMemory(role=place.role, weights=_part(shape.parameters, place, shape) * width)
    of_role = batches.critic if place.role == "critic" else batches
    assert of_role is not None
    return _trained(config, of_role, place, shape, config.context_tokens + config.rollout.max_response_tokens)


def _trained(
    config: TrainingConfig,
    plan: BatchPlan | CriticBatchPlan | SftBatchPlan,
    place: RolePlacement,
    shape: ModelShape,
    longest: int,  # sequence, tokens
) -> RoleMemory:
    section = learner_of(config, place.role)
    width, trained_width = BYTES[config.model.compute_dtype], BYTES[config.model.master_dtype]
    split = place.sizes.tensor * place.sizes.pipeline
    trained = trained_parameters(section, shape)
    tokens = section.max_tokens_per_micro_batch or (plan.sequences_per_micro_batch_per_device or 1) * longest
    if section.max_tokens_per_micro_batch is None:  # a budget of tokens is per device already
        tokens = -(-tokens // (place.sizes.sequence * place.sizes.context))
    checkpointing = recomputes(config, place.role)
    per_token = shape.hidden * (shape.layers + ACTIVATIONS if checkpointing else shape.layers * ACTIVATIONS)
    activations = tokens * per_token * width // split
    if place.engine == "fsdp":
        # The parts are their own masters.
        settings = fsdp_settings(section.engine_options, len(place.ranks))[0]
        parts, state = (
            shape.parameters * trained_width // settings.shard,
            trained * ADAM * trained_width // settings.shard,
        )
        on_device = (0, 0) if settings.cpu_offload else (parts, state)
        return RoleMemory(
            role=place.role,
            weights=on_device[0],
            optimizer=on_device[1],
            gathered=_gathered(settings, shape, width),
            activations=activations,
            host=parts + state - sum(on_device),
        )
    if place.engine == "deepspeed":
        return _by_zero(config, place, shape, trained=trained, activations=activations)
    spread = place.engine == "megatron" and megatron_settings(section.engine_options)[0].distributed_optimizer
    masters = trained_width if width < trained_width else 0  # otherwise the weights are their own masters
    return RoleMemory(
        role=place.role,
        weights=_part(shape.parameters, place, shape) * width,
        optimizer=(
            _part(trained, place, shape) * ((ADAM - AVERAGES) * trained_width + masters)
            + _part(trained, place, shape, spread=spread) * AVERAGES * trained_width
        )
        // place.sizes.shard,
        activations=activations,
    )


def _part(parameters: int, place: RolePlacement, shape: ModelShape, *, spread: bool = False) -> int:
    """What a device has of so many weights; ``spread``: of something that those with the same weights share out, too."""
    if place.engine != "megatron":
        return parameters // (place.sizes.tensor * place.sizes.pipeline)
    return sum(part // (alike if spread else 1) for part, alike in shape.parts(place.sizes, parameters))


def trained_parameters(section: LearnerConfig | CriticConfig, shape: ModelShape) -> int:
    """All of the model's, or about those of its adapter."""
    return ADAPTER * shape.layers * shape.hidden * section.lora.rank if section.lora else shape.parameters


def recomputes(config: TrainingConfig, role: str) -> bool:
    """Whether a trained role's activations are computed again in the backward pass (gradient checkpointing)."""
    own = config.critic if role == "critic" and isinstance(config, RunConfig) else config.model
    return own.gradient_checkpointing


def _scored_by_fsdp(config: RunConfig, place: RolePlacement, shape: ModelShape) -> RoleMemory:
    width = BYTES[config.model.compute_dtype]
    settings = fsdp_settings(sharing_options(config, "reference"), len(place.ranks), role="reference")[0]
    parts = shape.parameters * width // settings.shard
    off = settings.cpu_offload
    return RoleMemory(
        role=place.role,
        weights=0 if off else parts,
        gathered=_gathered(settings, shape, width),
        host=parts if off else 0,
    )


def _gathered(settings: FsdpSettings, shape: ModelShape, width: int) -> int:
    """Bytes of whole weights at once: two layers (one computes, one arrives) and what is outside of layers, or everything."""
    if settings.shard == 1:
        return shape.parameters * width if width < 4 else 0  # a rounded copy of the masters
    if settings.one_unit or settings.reshard_after_forward is False:
        return shape.parameters * width
    return (2 * shape.layer_parameters + shape.outer_parameters) * width


def _by_zero(
    config: TrainingConfig, place: RolePlacement, shape: ModelShape, *, trained: int, activations: int
) -> RoleMemory:
    ranks, width = len(place.ranks), BYTES[config.model.compute_dtype]
    settings = zero_settings(sharing_options(config, place.role), ranks, role=place.role)[0]
    held = zero_bytes(settings, parameters=shape.parameters, trained=trained, width=width, ranks=ranks)
    whole = (2 * shape.layer_parameters + shape.outer_parameters) * width if settings.stage == 3 and ranks > 1 else 0
    return RoleMemory(
        role=place.role,
        weights=held.weights,
        optimizer=held.optimizer,
        gathered=whole,
        activations=activations,
        host=held.host,
    )
