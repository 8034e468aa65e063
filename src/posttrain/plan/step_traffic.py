"""Estimate what a step sends between devices: bytes that each device receives and collective operations it takes part in.

Formulas, per device (docs/scaling.md derives them): A devices share a sequence, n tokens of a micro-batch are on one device:

    share a sequence   (A - 1) / A x n x (2 x query width + 2 x key/value width) w per layer and direction, 2 messages

What splitting a model sends is for its engine's plan to say.
"""

from __future__ import annotations

from posttrain.config import RunConfig, SftConfig, TrainingConfig, TuneConfig
from posttrain.config.critic import CriticConfig
from posttrain.config.policy import LearnerConfig
from posttrain.config.roles import driver_reads_tokens, learner_of, sends_adapter, shares_weights
from posttrain.plan.engine import Passes, PlacedModel, engine_plan
from posttrain.plan.estimate import recomputes, trained_parameters
from posttrain.plan.memory import BYTES
from posttrain.plan.model_shape import ModelShape
from posttrain.plan.placement import PlacementPlan, RolePlacement
from posttrain.plan.step_passes import step_passes
from posttrain.plan.traffic import Traffic
from posttrain.records.batch_plans import BatchPlan, CriticBatchPlan, SftBatchPlan

# What the driver sends and gets for a token of a sequence where its own stages handle tokens: its id (8), its mask (1), log-probs
# of sampler, policy and reference and an advantage (4 each).
DRIVER_BYTES_PER_TOKEN = 25
# And where tokens stay with the workers: names, digests, lengths and places of a sample (measured with benchmarks/controller.py:
# 0.46 KiB from the driver and 0.65 to it, of which 512 bytes are text), and the text of a token, of about 4 characters
DRIVER_BYTES_PER_SAMPLE = 625
TEXT_BYTES_PER_TOKEN = 4
# Roles whose passes send; a reward model is whole on its device.
SPLIT_AS_TRAINED = ("policy", "critic", "reference")


def step_traffic(config: RunConfig, batches: BatchPlan, plan: PlacementPlan, shape: ModelShape) -> list[Traffic]:
    """Compute the traffic of the policy's devices, and of the sampler's for its own part, assuming models of one shape."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    found: list[Traffic] = []
    for each in step_passes(config, batches, plan):
        if each.updates is not None:
            found += _update(config, each.updates, each.place, shape, longest)
        elif each.place.role in SPLIT_AS_TRAINED and not each.place.uses_weights_of:
            found += _score(config, each.what, each.place, batches, shape, longest)
    found += _weight_sync(config, plan, shape)
    found += _sampling(config, batches, plan, shape)
    by_reference = not driver_reads_tokens(config)
    found += _driver(batches, plan, longest, by_reference=by_reference)
    return [each for each in found if each.messages]


def sft_traffic(config: SftConfig, batches: SftBatchPlan, plan: PlacementPlan, shape: ModelShape) -> list[Traffic]:
    """Compute the traffic of the policy's devices in a step of supervised fine-tuning with sequences of full length."""
    policy, reference = plan.role("policy"), plan.role("reference")
    assert policy is not None, "every run has a policy"
    tokens = config.data.max_tokens
    found = _update(config, batches, policy, shape, tokens)
    if isinstance(config, TuneConfig) and reference is not None and not reference.uses_weights_of:
        found += _score(config, "reference log-probs", reference, batches, shape, tokens)
    found += _driver(batches, plan, tokens)
    return [each for each in found if each.messages]


def _driver(
    batches: BatchPlan | SftBatchPlan, plan: PlacementPlan, tokens: int, *, by_reference: bool = False
) -> list[Traffic]:
    policy = plan.role("policy")
    if plan.devices == 1 or policy is None:
        return []
    rows = -(-batches.sequences_per_step // policy.copies)
    of_row = DRIVER_BYTES_PER_SAMPLE + tokens * TEXT_BYTES_PER_TOKEN
    return [
        Traffic(what="driver", bytes=rows * (of_row if by_reference else tokens * DRIVER_BYTES_PER_TOKEN), messages=2)
    ]


def _update(
    config: TrainingConfig,
    plan: BatchPlan | CriticBatchPlan | SftBatchPlan,
    place: RolePlacement,
    shape: ModelShape,
    tokens: int,
) -> list[Traffic]:
    section = learner_of(config, place.role)
    forward = plan.updates_per_step * micro_batches(section, plan, place, tokens)
    directions = 3 if recomputes(config, place.role) else 2  # forward, backward, and forward again
    here = plan.updates_per_step * -(-plan.sequences_per_update * tokens // (place.copies * place.sizes.context))
    return [
        *engine_plan(place.engine).update_traffic(
            PlacedModel(config=config, place=place, shape=shape),
            Passes(forward=forward, directions=directions, tokens=here, updates=plan.updates_per_step),
        ),
        _share_sequence(config, section, plan, place, shape, tokens, forward * directions),
    ]


def _score(
    config: RunConfig | TuneConfig,
    name: str,
    place: RolePlacement,
    batches: BatchPlan | SftBatchPlan,
    shape: ModelShape,
    tokens: int,
) -> list[Traffic]:
    """Passes without gradient, in micro-batches of their own size."""
    section = config.reference
    rows = -(-batches.sequences_per_step // place.copies)
    if section.max_tokens_per_micro_batch is not None:
        passes = -(-rows * tokens // (section.max_tokens_per_micro_batch * place.sizes.sequence * place.sizes.context))
    else:
        passes = -(-rows // section.sequences_per_micro_batch_per_device)
    found = engine_plan(place.engine).scoring_traffic(
        PlacedModel(config=config, place=place, shape=shape),
        name,
        Passes(forward=passes, tokens=-(-rows * tokens // place.sizes.context)),
    )
    if place.sizes.sequence > 1:
        sent = _sequence_bytes(config, place, shape, -(-rows * tokens // place.sizes.sequence))
        found.append(
            Traffic(what=f"{name}: share sequences", bytes=sent, messages=2 * shape.layers * passes, within="sequence")
        )
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


def _share_sequence(
    config: TrainingConfig,
    section: LearnerConfig | CriticConfig,
    plan: BatchPlan | CriticBatchPlan | SftBatchPlan,
    place: RolePlacement,
    shape: ModelShape,
    tokens: int,
    passes: int,
) -> Traffic:
    what = f"{place.role}: share sequences"
    if place.sizes.sequence == 1:
        return Traffic(what=what, bytes=0, messages=0)
    of_update = -(-plan.sequences_per_update * tokens // (place.copies * place.sizes.sequence))
    # Passes over the step, each of which sees an update's tokens.
    directions = passes // micro_batches(section, plan, place, tokens)
    sent = directions * _sequence_bytes(config, place, shape, of_update)
    return Traffic(what=what, bytes=sent, messages=2 * shape.layers * passes, within="sequence")


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
    size = sent_weights(config, shape) // here
    kept = size // held if held else 0
    buckets = -(-size // (config.rollout.weight_bucket_mib << 20))
    return [Traffic(what="weights to the sampler", bytes=size - kept, messages=buckets if size > kept else 0)]


def sent_weights(config: RunConfig, shape: ModelShape) -> int:
    """Bytes of the weights that a sampler with weights of its own gets: of an adapter its tensors, where it takes these alone."""
    alone = shares_weights(config.rollout.engine) or sends_adapter(config.rollout, config.policy.lora)
    sent = trained_parameters(config.policy, shape) if alone else shape.parameters
    return sent * BYTES[config.model.compute_dtype]


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
            within="tensor",
        )
    ]
