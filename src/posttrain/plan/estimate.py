"""Estimate the memory that a run needs on each device, from the models' config.json and the sizes of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.config import RunConfig, SftConfig, TrainingConfig
from posttrain.config.critic import CriticConfig
from posttrain.config.distillation import ROLE
from posttrain.config.judge import is_judge, judge_role
from posttrain.config.policy import LearnerConfig
from posttrain.config.process_reward import PROCESS_REFERENCE, PROCESS_REWARD, ProcessRewardConfig
from posttrain.config.roles import learner_of, teachers_of
from posttrain.config.served_model import REWARD_SERVER
from posttrain.plan.engine import PlacedModel, averages_of, engine_plan, even_part
from posttrain.plan.memory import BYTES, RoleMemory
from posttrain.plan.model_shape import ModelShape, read_shape
from posttrain.plan.placement import PHASES, Phase, PlacementPlan, RolePlacement
from posttrain.records.batch_plans import BatchPlan, CriticBatchPlan, SftBatchPlan

# Weights of an adapter on all linear layers, per layer, hidden unit and rank: in + out of four attention matrices (7) and of
# an MLP four times as wide (15).
ADAPTER = 22
# Activations that the backward pass of one layer needs, in values per token and hidden unit: the inputs of attention,
# projections and products of the MLP (arXiv:2205.05198, section 4.1, without dropout and without the attention matrix).
ACTIVATIONS = 17
PROCESS_MODELS = "process model"  # with its reference
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Peak:
    """The fullest device, when it is fullest."""

    device: int
    phase: Phase
    bytes: int


def estimate(
    config: RunConfig, batches: BatchPlan, plan: PlacementPlan, *, on_cpu: bool | None = None
) -> list[RoleMemory] | None:
    """Estimate the bytes per device for every role whose model is a folder, and for the process reward model; None when the
    policy's is not (a hub id). Args: on_cpu: the devices are CPUs; None: as the plan says, or else as they are here."""
    shapes = role_shapes(config)
    if "policy" not in shapes:
        return None
    on_cpu = computes_on_cpu(plan.device) if on_cpu is None else on_cpu
    found = [
        role_memory(config, batches, place, shapes[place.role], on_cpu=on_cpu)
        for place in plan.roles
        if place.ranks and place.role in shapes
    ]
    process = process_reward_memory(config, plan)
    return found if process is None else [*found, process]


def computes_on_cpu(device: str) -> bool:
    """Tell whether models are on CPUs. Args: device: auto (then this machine's driver decides), cpu or cuda."""
    return device == "cpu" or (device == "auto" and not NVIDIA_DRIVER.exists())


def role_shapes(config: RunConfig) -> dict[str, ModelShape]:
    """Read the shape of the model of every role that a run can have; a model that is in no folder here (a hub id) has none."""
    paths = {"policy": config.model.path, "rollout": config.model.path}
    paths |= {
        "critic": config.critic.path or config.model.path,
        "reference": config.reference.path or config.model.path,
    }
    if config.reward.model is not None:
        paths["reward model"] = config.reward.model.path
    if config.reward.served is not None:
        paths[REWARD_SERVER] = config.reward.served.path
    paths |= {judge_role(name): judge.path for name, judge in config.reward.judges.items()}
    paths |= {role: teacher.path or config.model.path for role, teacher in teachers_of(config).items()}
    shapes = {path: read_shape(path) for path in set(paths.values())}
    return {role: shape for role, path in paths.items() if (shape := shapes[path]) is not None}


def estimate_sft(config: SftConfig, batches: SftBatchPlan, plan: PlacementPlan) -> list[RoleMemory] | None:
    """Estimate the same for supervised fine-tuning."""
    shape = read_shape(config.model.path)
    if shape is None:
        return None
    found = []
    for place in plan.roles:
        if place.role == "policy":
            found.append(_trained(config, batches, place, shape, config.data.max_tokens))
            continue
        path = _teacher_paths(config).get(place.role)
        frozen = read_shape(path) if path else shape
        if frozen is not None:
            found.append(_frozen(config, place, frozen))
    return found


def _teacher_paths(config: TrainingConfig) -> dict[str, str]:
    return {role: teacher.path for role, teacher in teachers_of(config).items() if teacher.path}


def _frozen(config: TrainingConfig, place: RolePlacement, shape: ModelShape) -> RoleMemory:
    """Estimate the bytes of a model that is never trained; 0 where it is another role's."""
    if place.uses_weights_of:
        return RoleMemory(role=place.role, weights=0)
    return engine_plan(place.engine).frozen_memory(PlacedModel(config=config, place=place, shape=shape))


def peak(plan: PlacementPlan, memory: list[RoleMemory]) -> Peak:
    """Find the device and phase with most in memory: what the working role uses, and what the others leave there."""
    by_role = {each.role: each for each in memory}
    process = by_role.get(PROCESS_MODELS)
    found = []
    for pool in plan.pools:
        here = [(role, by_role[role.role]) for role in plan.roles if role.role in pool.roles and role.role in by_role]
        kept = sum(size.kept(role.rests) for role, size in here)
        if process is not None and "policy" in pool.roles:
            kept += process.kept(())
        for phase in PHASES:
            # Roles on a device work one at a time, also two that are awake in the same phase.
            extra = [size.used(phase) - size.kept(role.rests) for role, size in here if phase in role.awake]
            if process is not None and "policy" in pool.roles:
                # All of it stays, and it is trained while it rewards
                extra.append(process.activations + process.gathered if phase == "reward" else 0)
            found.append(Peak(pool.devices[0], phase, kept + max(extra, default=0)))
    return max(found, key=lambda each: each.bytes)


def role_memory(
    config: RunConfig, batches: BatchPlan, place: RolePlacement, shape: ModelShape, *, on_cpu: bool = False
) -> RoleMemory:
    """Estimate the bytes on each device of one role, for a model of this shape."""
    width = BYTES[config.model.compute_dtype]
    split = place.sizes.tensor * place.sizes.pipeline  # sequence-parallel ranks hold all of a layer
    if place.role == "rollout":
        slots = min(config.rollout.max_concurrent_sequences, -(-batches.sequences_per_step // place.copies))
        tokens = slots * (config.context_tokens + config.rollout.max_response_tokens)
        return RoleMemory(
            role=place.role,
            weights=0 if place.uses_weights_of else shape.parameters * width // split,
            packed=_packed(config, shape) // split if on_cpu else 0,
            gathered=_unpacked(config, place, shape),
            cache=int(shape.cache_bytes(tokens, slots, width)) // split,
        )
    if (
        place.role in ("reference", "reward model", REWARD_SERVER)
        or is_judge(place.role)
        or place.role.startswith(ROLE)
    ):
        frozen = _frozen(config, place, shape)
        if place.role == "reference" and not place.uses_weights_of and config.reference.update_every is not None:
            # Its weights are kept in float32 besides.
            exact = even_part(shape.parameters, place) * BYTES["float32"] // place.sizes.shard
            return replace(frozen, weights=frozen.weights + exact)
        return frozen
    of_role = batches.critic if place.role == "critic" else batches
    assert of_role is not None
    return _trained(config, of_role, place, shape, config.context_tokens + config.rollout.max_response_tokens)


def _packed(config: RunConfig, shape: ModelShape) -> int:
    """Estimate the copies of the weights of layers and head, packed for products, that the native sampler has on a CPU."""
    if config.rollout.engine != "native":
        return 0
    weights = shape.parameters - shape.outer_parameters + shape.vocabulary * shape.hidden
    return weights * (1 if config.rollout.weights == "int8" else BYTES[config.model.compute_dtype])


def process_shapes(config: RunConfig) -> tuple[ModelShape, ModelShape] | None:
    """Read the shapes of the process reward model and of its reference; None without one, or where one of them is in no folder
    here."""
    process = config.reward.process
    if process is None:
        return None
    path = process.path or config.model.path
    shape, reference = read_shape(path), read_shape(process.reference_path or path)
    return None if shape is None or reference is None else (shape, reference)


def process_reward_memory(config: RunConfig, plan: PlacementPlan) -> RoleMemory | None:
    """Estimate the bytes on a device of the process reward model with its reference, which are beside the policy; None as for
    ``process_shapes``."""
    process, shapes = config.reward.process, process_shapes(config)
    if process is None or shapes is None:
        return None
    shape, reference = shapes
    policy = plan.role("policy")
    if policy is not None and engine_plan(policy.engine).shares_out:
        return _split_process_reward(config, process, policy, shape, reference)
    width, master = BYTES[config.model.compute_dtype], BYTES[config.model.master_dtype]
    states = master if width < master else 0
    activations = 0
    if process.update != "never":
        states += (1 + averages_of(process.optimizer)) * master  # the gradient, too
        activations = _process_activations(config, process, shape)
    return RoleMemory(
        role=PROCESS_MODELS,
        weights=(shape.parameters + reference.parameters) * width,
        optimizer=shape.parameters * states,
        activations=activations,
    )


def _process_activations(config: RunConfig, process: ProcessRewardConfig, shape: ModelShape, ranks: int = 1) -> int:
    """Estimate the bytes that a backward pass needs. Args: ranks that share a sequence."""
    tokens = process.sequences_per_micro_batch * (config.context_tokens + config.rollout.max_response_tokens)
    per_token = _per_token(shape, process.gradient_checkpointing) * BYTES[config.model.compute_dtype]
    return -(-tokens // ranks) * per_token


def _split_process_reward(
    config: RunConfig, process: ProcessRewardConfig, policy: RolePlacement, shape: ModelShape, reference: ModelShape
) -> RoleMemory:
    """Estimate the bytes on a device where the policy's engine splits both models."""
    engine, sizes = engine_plan(policy.engine), policy.sizes
    model = PlacedModel(config=config, place=replace(policy, role=PROCESS_REWARD), shape=shape)
    frozen = PlacedModel(config=config, place=replace(policy, role=PROCESS_REFERENCE), shape=reference)
    trains = process.update != "never"
    activations = _process_activations(config, process, shape, sizes.sequence * sizes.context) if trains else 0
    own = engine.trained_memory(
        model,
        trained=shape.parameters if trains else 0,
        activations=activations // (sizes.tensor * sizes.pipeline),
    )
    beside = engine.frozen_memory(frozen)
    return replace(
        own,
        role=PROCESS_MODELS,
        weights=own.weights + beside.weights,
        gathered=max(own.gathered, beside.gathered),
        host=own.host + beside.host,
    )


def _per_token(shape: ModelShape, recomputed: bool) -> int:
    """Estimate the values that a backward pass needs of a token. Args: recomputed: of all layers but one, their inputs alone."""
    return shape.hidden * (shape.layers + ACTIVATIONS if recomputed else shape.layers * ACTIVATIONS)


def _unpacked(config: RunConfig, place: RolePlacement, shape: ModelShape) -> int:
    """Estimate the copies of 4-bit weights in the compute dtype that the native sampler makes while it samples."""
    lora = config.policy.lora
    if not place.uses_weights_of or lora is None or lora.quantize is None or config.rollout.engine != "native":
        return 0
    return shape.parameters * BYTES[config.model.compute_dtype]


def _trained(
    config: TrainingConfig,
    plan: BatchPlan | CriticBatchPlan | SftBatchPlan,
    place: RolePlacement,
    shape: ModelShape,
    longest: int,  # sequence, tokens
) -> RoleMemory:
    section = learner_of(config, place.role)
    tokens = section.max_tokens_per_micro_batch or (plan.sequences_per_micro_batch_per_device or 1) * longest
    if section.max_tokens_per_micro_batch is None:  # a budget of tokens is per device already
        tokens = -(-tokens // (place.sizes.sequence * place.sizes.context))
    activations = tokens * _per_token(shape, recomputes(config, place.role)) * BYTES[config.model.compute_dtype]
    return engine_plan(place.engine).trained_memory(
        PlacedModel(config=config, place=place, shape=shape),
        trained=trained_parameters(section, shape),
        activations=activations // (place.sizes.tensor * place.sizes.pipeline),
    )


def trained_parameters(section: LearnerConfig | CriticConfig, shape: ModelShape) -> int:
    """Count the weights that are trained: all of the model's, or about those of its adapter."""
    return ADAPTER * shape.layers * shape.hidden * section.lora.rank if section.lora else shape.parameters


def recomputes(config: TrainingConfig, role: str) -> bool:
    """Tell whether a role's activations are computed again in the backward pass (gradient checkpointing)."""
    own = config.critic if role == "critic" and isinstance(config, RunConfig) else config.model
    return own.gradient_checkpointing
