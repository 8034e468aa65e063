"""Compute the seconds of a step from the models' shapes, the placement and a machine's peaks.

P weights that a token meets (of experts, those chosen), L layers, q query width; sums over the tokens of a device:

    passes             2 P and 4 q L x (positions attended to) a token forward, twice that backward (arXiv:2001.08361, section
                       2.1), forward again with recomputation; a prompt counts once for the rows that share it
    one decoding step  the larger of  (weights + rows x tokens so far x 2 key/value width L) bytes / bandwidth
                       and 2 P x rows / arithmetic
    sending            bytes / the slowest link of the group + messages x latency; new weights: plan.timing.weight_links

Sequences have full length, nothing overlaps but sampling and training on devices of their own where ``asynchronous.mode`` asks
for it, and each peak is multiplied by the share that the machine file says is attained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from posttrain.config import RunConfig
from posttrain.config.judge import is_judge
from posttrain.config.machine import MachineConfig
from posttrain.plan.estimate import recomputes, trained_parameters
from posttrain.plan.memory import BYTES
from posttrain.plan.model_shape import ModelShape
from posttrain.plan.placement import PlacementPlan, RolePlacement
from posttrain.plan.step_passes import StepPass, step_passes
from posttrain.plan.step_traffic import step_traffic
from posttrain.plan.timing.weight_links import WeightSyncTime, weight_sync_time
from posttrain.plan.traffic import Traffic
from posttrain.records.batch_plans import BatchPlan

SAMPLING = "sampling"
DRIVER = "driver"
WEIGHTS = "weights to the sampler"
TERA, GIGA, MICRO = 1e12, 1e9, 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Seconds of one part of a step."""

    what: str
    computing: float = 0.0
    sending: float = 0.0

    @property
    def seconds(self) -> float:
        return self.computing + self.sending


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step, by part."""

    parts: tuple[Work, ...]
    weight_sync: WeightSyncTime
    overlaps: bool  # the next sampling goes on while this step trains
    not_counted: tuple[str, ...] = ()  # roles whose shape is not known, or whose work the formulas do not cover

    @property
    def seconds(self) -> float:
        ahead = sum(each.seconds for each in self.parts if each.what == SAMPLING)
        rest = sum(each.seconds for each in self.parts) - ahead
        return max(ahead, rest) if self.overlaps else ahead + rest


def step_time(
    config: RunConfig,
    batches: BatchPlan,
    plan: PlacementPlan,
    shapes: Mapping[str, ModelShape],
    machine: MachineConfig,
) -> StepTime:
    """Compute the seconds of a step on ``machine``. Args: shapes of the roles' models, the policy's among them."""
    policy = shapes["policy"]
    sent = _sending(step_traffic(config, batches, plan, policy), plan, machine)
    sync = weight_sync_time(config, plan, policy, machine)
    if sync.links:
        sent[WEIGHTS] = sync.seconds
    parts, missing = (
        [],
        [role.role for role in plan.roles if role.ranks and (is_judge(role.role) or role.role not in shapes)],
    )
    rollout = plan.role("rollout")
    assert rollout is not None, "every run samples"
    if rollout.ranks:
        parts.append(Work(what=SAMPLING, computing=_sampling(config, batches, rollout, policy, machine)))
    else:
        missing.append("sampling, by servers outside of the run")
    for each in step_passes(config, batches, plan):
        shape = shapes.get(each.place.role)
        if shape is not None:
            parts.append(Work(what=each.what, computing=_passes(config, batches, each, shape, machine)))
    timed = [Work(what=part.what, computing=part.computing, sending=sent.pop(part.what, 0.0)) for part in parts]
    timed += [Work(what=what, sending=seconds) for what, seconds in sent.items()]
    # On the same devices one waits for the other, whatever the order.
    apart = not set(rollout.devices) & {device for each in plan.roles if each is not rollout for device in each.devices}
    return StepTime(
        parts=tuple(timed), weight_sync=sync, overlaps=config.asynchronous.is_on and apart, not_counted=tuple(missing)
    )


def _passes(config: RunConfig, batches: BatchPlan, work: StepPass, shape: ModelShape, machine: MachineConfig) -> float:
    rows, together = batches.sequences_per_step, config.reference.sequences_per_micro_batch_per_device
    if work.updates is not None:
        rows = work.updates.updates_per_step * work.updates.sequences_per_update
        together = work.updates.sequences_per_micro_batch_per_device or batches.samples_per_prompt
    tokens, attended = _row(config, batches, together)
    met = met_weights(shape)
    attention = 4 * attended * shape.query_width * shape.attention_layers
    forward, share = 2 * met * tokens + attention, machine.attained.scoring
    flops = forward
    if work.updates is not None:
        learner = config.critic if work.place.role == "critic" else config.policy
        # Gradients of the weights that are trained, of all that the gradient passes through, and of attention twice.
        backward = 2 * (min(met, trained_parameters(learner, shape)) + met) * tokens + 2 * attention
        flops += backward + (forward if recomputes(config, work.place.role) else 0)
        share = machine.attained.training
    per_device = flops * rows / len(work.place.ranks)
    return per_device * _bubble(work) / (machine.tflops * TERA * share)


def _row(config: RunConfig, batches: BatchPlan, together: int) -> tuple[float, float]:
    """Return the tokens that a row adds to a micro-batch of so many rows, and the positions that they attend to in all.

    A prompt goes through the model once for the rows of its group in a micro-batch (policy.share_prompts).
    """
    prompt, response = config.context_tokens, config.rollout.max_response_tokens
    shares = config.policy.share_prompts and not config.model.padded and not config.environment.used
    alike = min(together, batches.samples_per_prompt) if shares else 1
    return prompt / alike + response, prompt**2 / 2 / alike + response * (prompt + response / 2)


def _bubble(work: StepPass) -> float:
    """Factor of time that filling and emptying a pipeline takes: (m + p - 1) / m (arXiv:2104.04473, eq. 2.2.1)."""
    stages = work.place.sizes.pipeline
    if stages == 1 or work.updates is None:
        return 1.0
    micro = work.updates.gradient_accumulation_steps or stages
    return (micro + stages - 1) / micro


def _sampling(
    config: RunConfig, batches: BatchPlan, place: RolePlacement, shape: ModelShape, machine: MachineConfig
) -> float:
    """Prefill of every prompt once, then waves of as many responses as are decoded side by side."""
    width, split = BYTES[config.model.compute_dtype], place.sizes.tensor * place.sizes.pipeline
    prompt, response = config.context_tokens, config.rollout.max_response_tokens
    scoring = machine.tflops * TERA * machine.attained.scoring
    weights = met_weights(shape)
    prompts = -(-batches.prompts_per_step // place.copies)
    prefill = (
        prompts * prompt * (2 * weights + 2 * prompt * shape.query_width * shape.attention_layers) / split / scoring
    )
    rows = -(-batches.sequences_per_step // place.copies)
    together = min(rows, config.rollout.max_concurrent_sequences)
    waves = -(-rows // together)
    cache = shape.cache_bytes(together * (prompt + response / 2), together, width)
    read = (_read_weights(shape, together) * width + cache) / split
    bandwidth = machine.memory_gb_s * GIGA * machine.attained.decoding
    each = max(read / bandwidth, 2 * weights * together / split / scoring)
    return prefill + waves * response * each


def met_weights(shape: ModelShape) -> int:
    """Count the weights that one token is multiplied with: of experts the chosen ones, of the embeddings the head alone."""
    embedded = shape.vocabulary * shape.hidden
    embeddings = shape.outer_parameters - embedded if shape.outer_parameters > 1.5 * embedded else 0
    idle = 0
    if shape.experts is not None:
        idle = shape.expert_parameters * (shape.experts.experts - shape.experts.chosen) // shape.experts.experts
    return shape.parameters - embeddings - idle


def _read_weights(shape: ModelShape, rows: int) -> float:
    """Count the weights that a decoding step reads: of experts, those that at least one of the rows chose, at random."""
    met = met_weights(shape)
    if shape.experts is None:
        return met
    share = shape.experts.chosen / shape.experts.experts
    return met - shape.expert_parameters * share + shape.expert_parameters * (1 - (1 - share) ** rows)


def _sending(traffic: Iterable[Traffic], plan: PlacementPlan, machine: MachineConfig) -> dict[str, float]:
    """Add up the seconds by the part of the step that waits for them, which the traffic's name begins with."""
    found: dict[str, float] = {}
    for each in traffic:
        what = each.what.partition(":")[0]
        # Its copies of the policy get their rows one after another from one driver.
        copies, bandwidth = 1, _bandwidth(each, what, plan, machine) * GIGA * machine.attained.links
        if what == DRIVER:
            policy = plan.role("policy")
            copies, bandwidth = policy.copies if policy else 1, machine.driver_gb_s * GIGA
        seconds = copies * each.bytes / bandwidth + each.messages * machine.latency_us * MICRO
        found[what] = found.get(what, 0.0) + seconds
    return found


def _bandwidth(traffic: Traffic, what: str, plan: PlacementPlan, machine: MachineConfig) -> float:
    """Return the bandwidth of the slowest link that such a message crosses, in 10^9 bytes/s."""
    roles = {SAMPLING: "rollout", "old log-probs": "policy", "entropies": "policy", "values": "critic"}
    role = plan.role(roles.get(what, "reference" if what == "reference log-probs" else what))
    if traffic.within is None or role is None:  # to the sampler
        policy, rollout = plan.role("policy"), plan.role("rollout")
        assert policy is not None and rollout is not None
        across = {rank.node for rank in policy.ranks} != {rank.node for rank in rollout.ranks} or plan.nodes > 1
    else:
        nodes = [rank.node for rank in role.ranks]
        across = any(len({nodes[rank] for rank in group}) > 1 for group in role.groups(traffic.within))
    return machine.network_gb_s or machine.link_gb_s if across else machine.link_gb_s
