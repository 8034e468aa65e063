"""What a step sends between devices: bytes that each device receives and collective operations it takes part in. Torch-free.

Formulas, per device (docs/scaling.md derives them). P parameters, w bytes of a gathered weight, r bytes of a reduced gradient,
S devices of a shard group, K such groups, A devices of a sequence group, n tokens of a micro-batch on one device, M units:

    gather once        (S - 1) / S x P w                    M messages
    reduce once        (S - 1) / S x P r  + 2 (K - 1) / K x P / S x r      M messages, 2 M with K > 1
    share a sequence   (A - 1) / A x n x (2 x query width + 2 x key/value width) w per layer and direction, 2 messages
"""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.config import RunConfig, SftConfig, TrainingConfig
from posttrain.config.critic import CriticConfig
from posttrain.config.policy import LearnerConfig
from posttrain.config.roles import learner_of, needs_old_logprobs, sends_adapter, shares_weights
from posttrain.plan.megatron import megatron_settings, virtual_stages
from posttrain.plan.memory import BYTES, recomputes, trained_parameters
from posttrain.plan.model_shape import ModelShape
from posttrain.plan.placement import PlacementPlan, RolePlacement
from posttrain.plan.roles import sharing_options
from posttrain.plan.sharding import FsdpSettings, fsdp_settings
from posttrain.plan.zero import zero_settings
from posttrain.records.plans import BatchPlan, CriticBatchPlan, SftBatchPlan

# What the driver sends and gets for a token of a sequence: its id (8), its mask (1), log-probs of sampler, policy and reference
# and an advantage (4 each).
DRIVER_BYTES_PER_TOKEN = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one device receives in a step for one purpose."""

    what: str
    bytes: int
    messages: int  # collective operations, or transfers


def step_traffic(config: RunConfig, batches: BatchPlan, plan: PlacementPlan, shape: ModelShape) -> list[Traffic]:
    """Of the policy's devices, and of the sampler's for its own part. Models are taken to be of one shape."""
    tokens = config.data.max_prompt_tokens + config.rollout.max_response_tokens  # of a sequence, at most
    found: list[Traffic] = []
    policy, reference, critic = plan.role("policy"), plan.role("reference"), plan.role("critic")
    assert policy is not None, "every run has a policy"
    scored = batches.updates_per_step > 1 or needs_old_logprobs(config)
    found += _update(config, batches, policy, shape, tokens)
    if scored:
        found += _score(config, "old log-probs", policy, batches, shape, tokens)
    if reference is not None and not reference.uses_weights_of:
        found += _score(config, "reference log-probs", reference, batches, shape, tokens)
    if critic is not None and batches.critic is not None:
        found += _update(config, batches.critic, critic, shape, tokens)
        found += _score(config, "values", critic, batches, shape, tokens)
    found += _weight_sync(config, plan, shape)
    found += _sampling(config, batches, plan, shape)
    found += _driver(batches, plan, tokens)
    return [each for each in found if each.messages]


def sft_traffic(config: SftConfig, batches: SftBatchPlan, plan: PlacementPlan, shape: ModelShape) -> list[Traffic]:
    """Of the policy's devices, in a step of supervised fine-tuning with sequences of full length."""
    (policy,) = plan.roles
    tokens = config.data.max_tokens
    found = [*_update(config, batches, policy, shape, tokens), *_driver(batches, plan, tokens)]
    return [each for each in found if each.messages]


def _driver(batches: BatchPlan | SftBatchPlan, plan: PlacementPlan, tokens: int) -> list[Traffic]:
    policy = plan.role("policy")
    if plan.devices == 1 or policy is None:
        return []
    rows = -(-batches.sequences_per_step // policy.copies)
    return [Traffic(what="driver", bytes=rows * tokens * DRIVER_BYTES_PER_TOKEN, messages=2)]


def _update(
    config: TrainingConfig,
    plan: BatchPlan | CriticBatchPlan | SftBatchPlan,
    place: RolePlacement,
    shape: ModelShape,
    tokens: int,
) -> list[Traffic]:
    name, section = place.role, learner_of(config, place.role)
    passes = plan.updates_per_step * micro_batches(section, plan, place, tokens)
    found = []
    if place.engine == "fsdp":
        settings = _settings(config, place)
        width, reduce = BYTES[config.model.compute_dtype], BYTES[settings.reduce_dtype]
        found.append(_gather(f"{name}: gather weights", settings, shape, width, passes, again=_regathered(settings)))
        found.append(_reduce(f"{name}: reduce gradients", settings, shape, reduce, passes))
    if place.engine == "deepspeed":
        found += _spread_by_zero(config, place, shape, passes, plan.updates_per_step)
    directions = 3 if recomputes(config, name) else 2  # forward, backward, and forward again
    if place.engine == "megatron":
        here = plan.updates_per_step * -(-plan.sequences_per_update * tokens // (place.copies * place.sizes.context))
        found += _split_layers(name, config, place, shape, here, passes, directions)
        found.append(_add_up(name, config, place, shape, plan.updates_per_step))
        found.append(_tell_updates(name, config, place, shape, plan.updates_per_step))
    found.append(
        _share_sequence(f"{name}: share sequences", config, section, plan, place, shape, tokens, passes * directions)
    )
    return found


def _score(
    config: RunConfig, name: str, place: RolePlacement, batches: BatchPlan, shape: ModelShape, tokens: int
) -> list[Traffic]:
    """Passes without gradient, in micro-batches of their own size."""
    section = config.reference
    rows = -(-batches.sequences_per_step // place.copies)
    if section.max_tokens_per_micro_batch is not None:
        passes = -(-rows * tokens // (section.max_tokens_per_micro_batch * place.sizes.sequence * place.sizes.context))
    else:
        passes = -(-rows // section.sequences_per_micro_batch_per_device)
    found = []
    if place.engine == "fsdp":
        width = BYTES[config.model.compute_dtype]
        found.append(_gather(f"{name}: gather weights", _settings(config, place), shape, width, passes))
    if place.engine == "deepspeed" and place.sizes.shard > 1:
        spread = FsdpSettings(shard=place.sizes.shard)  # gathered layer by layer, as by fsdp
        found.append(_gather(f"{name}: gather weights", spread, shape, BYTES[config.model.compute_dtype], passes))
    if place.engine == "megatron":
        here = -(-rows * tokens // place.sizes.context)
        found += _split_layers(name, config, place, shape, here, passes, directions=1)
    if place.sizes.sequence > 1:
        sent = _sequence_bytes(config, place, shape, -(-rows * tokens // place.sizes.sequence))
        found.append(Traffic(what=f"{name}: share sequences", bytes=sent, messages=2 * shape.layers * passes))
    return found


def micro_batches(
    section: LearnerConfig | CriticConfig,
    plan: BatchPlan | CriticBatchPlan | SftBatchPlan,
    place: RolePlacement,
    tokens: int,
) -> int:
    """Forward and backward passes of an update on each device; cut by tokens: with sequences of full length."""
    if plan.gradient_accumulation_steps is not None:
        return plan.gradient_accumulation_steps
    assert section.max_tokens_per_micro_batch is not None, "cut by count otherwise"
    rows = -(-plan.sequences_per_update // place.copies)
    fit = section.max_tokens_per_micro_batch * place.sizes.sequence * place.sizes.context // tokens
    return -(-rows // max(1, fit))


def _settings(config: TrainingConfig, place: RolePlacement) -> FsdpSettings:
    return fsdp_settings(sharing_options(config, place.role), len(place.ranks), role=place.role)[0]


def _units(settings: FsdpSettings, shape: ModelShape) -> int:
    """Groups of parameters that travel together: the layers, and the rest."""
    return 1 if settings.one_unit else shape.layers + 1


def _regathered(settings: FsdpSettings) -> int:
    """Devices from which the backward pass gathers every layer again; 1: it is still there."""
    if settings.one_unit or settings.reshard_after_forward is False:
        return 1
    return settings.shard if settings.reshard_after_forward is True else int(settings.reshard_after_forward)


def _gather(what: str, settings: FsdpSettings, shape: ModelShape, width: int, times: int, again: int = 1) -> Traffic:
    """Args: times forward; again as _regathered, for the backward pass of each."""
    groups = [group for group in (settings.shard, again) if group > 1]
    return Traffic(
        what=what,
        bytes=times * sum(shape.parameters * width * (group - 1) // group for group in groups),
        messages=times * len(groups) * _units(settings, shape),
    )


def _reduce(what: str, settings: FsdpSettings, shape: ModelShape, width: int, times: int) -> Traffic:
    shard, replicas = settings.shard, settings.replicas
    within = shape.parameters * width * (shard - 1) // shard
    between = 2 * shape.parameters * width * (replicas - 1) // (replicas * shard)
    kinds = (shard > 1) + (replicas > 1)
    return Traffic(what=what, bytes=times * (within + between), messages=times * kinds * _units(settings, shape))


def _spread_by_zero(
    config: TrainingConfig, place: RolePlacement, shape: ModelShape, passes: int, updates: int
) -> list[Traffic]:
    """ZeRO's messages: stage 3 gathers weights for every pass and stages 1 and 2 after every update; stage 1 reduces gradients
    once per update, the others in every pass."""
    ranks, name, units = len(place.ranks), place.role, shape.layers + 1
    settings = zero_settings(sharing_options(config, name), ranks, role=name)[0]
    weights = shape.parameters * BYTES[config.model.compute_dtype]
    gradients = shape.parameters * BYTES[settings.reduce_dtype] * (ranks - 1) // ranks
    times = updates if settings.stage == 1 else passes
    if ranks == 1:
        return []
    found = [Traffic(what=f"{name}: reduce gradients", bytes=times * gradients, messages=times * units)]
    if settings.stage < 3:
        sent = updates * weights * (ranks - 1) // ranks
        return [*found, Traffic(what=f"{name}: gather new weights", bytes=sent, messages=updates)]
    near = settings.second_partition if settings.second_partition > 1 else ranks  # back, from the second copy
    sent = passes * sum(weights * (group - 1) // group for group in (ranks, near))
    return [Traffic(what=f"{name}: gather weights", bytes=sent, messages=2 * passes * units), *found]


def _split_layers(
    name: str,
    config: TrainingConfig,
    place: RolePlacement,
    shape: ModelShape,
    tokens: int,
    passes: int,
    directions: int,
) -> list[Traffic]:
    """Megatron's messages, of a stage in the middle: two sums over hidden states per layer and direction among ranks that share
    matrices (arXiv:1909.08053, section 3; a gathering and a scattering of as many bytes where they share tokens, too), two
    exchanges of heads where they share sequences, and hidden states from stage to stage, and gradients back, once for each
    virtual stage. An MLP of experts has no such sum: tokens travel to them instead.

    Args: tokens on this device, in all of so many passes.
    """
    sizes, width = place.sizes, BYTES[config.model.compute_dtype]
    layers = -(-shape.layers // sizes.pipeline)
    splitter = learner_of(
        config, "policy" if place.role == "reference" else place.role
    )  # the reference goes with the policy
    split, _, _ = megatron_settings(splitter.engine_options)
    stretches = virtual_stages(split, layers=shape.layers, pipeline=sizes.pipeline)
    states = tokens * shape.hidden * width
    mixed = -(-sum(shape.experts.layers) // sizes.pipeline) if shape.experts else 0
    sums = 2 * layers - (mixed if shape.experts and not shape.experts.shared_width else 0)
    heads = tokens * (2 * shape.query_width + 2 * shape.key_value_width) // sizes.tensor * width
    return [
        Traffic(
            what=f"{name}: share matrices",
            bytes=directions * sums * 2 * states * (sizes.tensor - 1) // sizes.tensor,
            messages=directions * sums * passes if sizes.tensor > 1 else 0,
        ),
        _to_experts(
            f"{name}: tokens to experts", place, shape, split.experts.dispatcher, states, directions * mixed, passes
        ),
        Traffic(
            what=f"{name}: share sequences",
            bytes=directions * layers * heads * (sizes.context - 1) // sizes.context,
            messages=directions * layers * 2 * passes if sizes.context > 1 else 0,
        ),
        Traffic(
            what=f"{name}: share layers",
            bytes=min(directions, 2) * stretches * states if sizes.pipeline > 1 else 0,
            messages=min(directions, 2) * stretches * passes if sizes.pipeline > 1 else 0,
        ),
    ]


def _to_experts(
    what: str, place: RolePlacement, shape: ModelShape, dispatcher: str, states: int, layers: int, passes: int
) -> Traffic:
    """Tokens to the ranks of their experts, and what these made of them back: to the ranks that share the experts, and within
    these to those that share one; or all tokens to all of them.

    Args: states: bytes of hidden states of all tokens on this device; layers that they go through, in every direction.
    """
    over, one_over = place.sizes.expert, place.sizes.expert_tensor
    if shape.experts is None or over * one_over == 1:
        return Traffic(what=what, bytes=0, messages=0)
    here = states // place.sizes.tensor
    if dispatcher == "allgather":
        received, kinds = here * (over * one_over - 1), 1
    else:
        sent = here * shape.experts.chosen
        received, kinds = sent * (over - 1) // over + sent * (one_over - 1), (over > 1) + (one_over > 1)
    return Traffic(what=what, bytes=2 * layers * received, messages=2 * layers * kinds * passes)


def _add_up(name: str, config: TrainingConfig, place: RolePlacement, shape: ModelShape, updates: int) -> Traffic:
    """Gradients of a rank's part over its copies, once per update: a message for each of a layer's six weights, and three. Those
    of experts, two of a layer's, over the ranks with the same part of the same ones."""
    with_experts = sum(shape.experts.layers) if shape.experts else 0
    layers, mixed = (-(-count // place.sizes.pipeline) for count in (shape.layers, with_experts))
    width, messages = BYTES[config.model.master_dtype], (6 * layers - mixed + 3, 2 * mixed)
    groups = [(part, alike, count) for (part, alike), count in zip(shape.parts(place.sizes), messages, strict=True)]
    return Traffic(
        what=f"{name}: reduce gradients",
        bytes=updates * sum(2 * part * width * (alike - 1) // alike for part, alike, _ in groups),
        messages=updates * sum(count for _, alike, count in groups if alike > 1),
    )


def _tell_updates(name: str, config: TrainingConfig, place: RolePlacement, shape: ModelShape, updates: int) -> Traffic:
    """New weights, from the ranks that have each updated a stretch of them, where the optimizer is distributed."""
    spread = megatron_settings(learner_of(config, name).engine_options)[0].distributed_optimizer
    groups = [(part, alike) for part, alike in shape.parts(place.sizes) if spread and part and alike > 1]
    width = BYTES[config.model.master_dtype]
    return Traffic(
        what=f"{name}: gather new weights",
        bytes=updates * sum(part * width * (alike - 1) // alike for part, alike in groups),
        messages=updates * len(groups),
    )


def _share_sequence(
    what: str,
    config: TrainingConfig,
    section: LearnerConfig | CriticConfig,
    plan: BatchPlan | CriticBatchPlan | SftBatchPlan,
    place: RolePlacement,
    shape: ModelShape,
    tokens: int,
    passes: int,
) -> Traffic:
    if place.sizes.sequence == 1:
        return Traffic(what=what, bytes=0, messages=0)
    of_update = -(-plan.sequences_per_update * tokens // (place.copies * place.sizes.sequence))
    directions = passes // micro_batches(section, plan, place, tokens)  # over the step: each sees an update's tokens
    sent = directions * _sequence_bytes(config, place, shape, of_update)
    return Traffic(what=what, bytes=sent, messages=2 * shape.layers * passes)


def _sequence_bytes(config: TrainingConfig, place: RolePlacement, shape: ModelShape, tokens: int) -> int:
    """Queries, keys and values one way and outputs back, of this many tokens on a device, in all layers."""
    group = place.sizes.sequence
    copies = -(-group // shape.key_value_heads) if group > shape.key_value_heads else 1
    widths = 2 * shape.query_width + 2 * shape.key_value_width * copies
    return shape.layers * tokens * widths * BYTES[config.model.compute_dtype] * (group - 1) // group


def _weight_sync(config: RunConfig, plan: PlacementPlan, shape: ModelShape) -> list[Traffic]:
    """New weights for the sampler: all of them for every copy of it, less what its devices hold already; of an adapter its own
    tensors, unless the sampler is a server that takes none."""
    rollout, policy = plan.role("rollout"), plan.role("policy")
    assert rollout is not None and policy is not None
    if rollout.uses_weights_of or not rollout.ranks:
        return []
    here = rollout.sizes.tensor * rollout.sizes.pipeline
    held = (
        policy.sizes.shard * policy.sizes.tensor * policy.sizes.pipeline
        if set(policy.devices) & set(rollout.devices)
        else 0
    )
    alone = shares_weights(rollout.engine) or sends_adapter(config.rollout, config.policy.lora)
    sent = trained_parameters(config.policy, shape) if alone else shape.parameters
    size = sent * BYTES[config.model.compute_dtype] // here
    kept = size // held if held else 0
    buckets = -(-size // (config.rollout.weight_bucket_mib << 20))
    return [Traffic(what="weights to the sampler", bytes=size - kept, messages=buckets if size > kept else 0)]


def _sampling(config: RunConfig, batches: BatchPlan, plan: PlacementPlan, shape: ModelShape) -> list[Traffic]:
    """Tensor parallel sampling: two sums over hidden states per layer and pass (arXiv:1909.08053, section 3)."""
    rollout = plan.role("rollout")
    assert rollout is not None
    tensor = rollout.sizes.tensor
    if tensor == 1 or not rollout.ranks:
        return []
    rows = -(-batches.sequences_per_step // rollout.copies)
    response = config.rollout.max_response_tokens
    tokens = rows * response + -(-batches.prompts_per_step // rollout.copies) * config.data.max_prompt_tokens
    size = 2 * shape.hidden * BYTES[config.model.compute_dtype] * (tensor - 1) // tensor
    waves = -(-rows // config.rollout.max_concurrent_sequences)
    return [
        Traffic(
            what="sampling: sum over tensor-parallel devices",
            bytes=2 * shape.layers * tokens * size,
            messages=2 * shape.layers * waves * response,
        )
    ]
