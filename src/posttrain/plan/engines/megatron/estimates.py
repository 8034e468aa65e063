"""Estimates of memory and traffic of models that megatron splits."""

from __future__ import annotations

from posttrain.config.roles import learner_of
from posttrain.plan.engine import Passes, PlacedModel
from posttrain.plan.engines.megatron.options import MegatronSettings, megatron_settings, virtual_stages
from posttrain.plan.memory import ADAM, AVERAGES, RoleMemory
from posttrain.plan.model_shape import ModelShape
from posttrain.plan.placement import GroupSizes, RolePlacement
from posttrain.plan.traffic import Traffic


def parts(shape: ModelShape, sizes: GroupSizes, parameters: int | None = None) -> list[tuple[int, int]]:
    """Split so many weights (None: all) and return a device's part with the number of ranks that hold the same.

    The first are the weights split by matrices and layers, the second those of experts, which are also split one by one.
    """
    experts = shape.expert_parameters
    rest = (shape.parameters if parameters is None else parameters) - experts
    split, copies = sizes.tensor * sizes.pipeline, sizes.data * sizes.context
    over = sizes.expert * sizes.expert_tensor
    return [(rest // split, copies), (experts // (over * sizes.pipeline), max(1, copies * sizes.tensor // over))]


def part(parameters: int, place: RolePlacement, shape: ModelShape, *, spread: bool = False) -> int:
    """Return a device's part of so many weights. Args: spread over those with the same weights, too."""
    return sum(each // (alike if spread else 1) for each, alike in parts(shape, place.sizes, parameters))


def trained_memory(model: PlacedModel, *, trained: int, activations: int) -> RoleMemory:
    """A distributed optimizer's averages are spread over the devices that hold the same weights."""
    shape, place, width, master_width = model.shape, model.place, model.width, model.master_width
    spread = megatron_settings(model.options).settings.distributed_optimizer
    masters = master_width if width < master_width else 0  # otherwise the weights are their own masters
    state = part(trained, place, shape) * ((ADAM - AVERAGES) * master_width + masters)
    averages = part(trained, place, shape, spread=spread) * AVERAGES * master_width
    return RoleMemory(
        role=model.role,
        weights=part(shape.parameters, place, shape) * width,
        optimizer=state + averages,
        activations=activations,
    )


def update_traffic(model: PlacedModel, passes: Passes) -> list[Traffic]:
    """Estimate what splitting sends, and the sum of gradients over copies."""
    return [
        *split_traffic(model, model.role, passes),
        _reduce_gradients(model, passes.updates),
        _gather_new_weights(model, passes.updates),
    ]


def split_traffic(model: PlacedModel, purpose: str, passes: Passes) -> list[Traffic]:
    """Estimate what a stage in the middle of the pipeline receives.

    Two sums over hidden states per layer and direction among ranks that share matrices (arXiv:1909.08053, section 3; a gathering
    and a scattering of as many bytes where they share tokens, too), two exchanges of heads where they share sequences, and
    hidden states from stage to stage, and gradients back, once for each virtual stage. An MLP of experts has no such sum:
    tokens travel to them instead.
    """
    sizes, shape, directions = model.place.sizes, model.shape, passes.directions
    layers = -(-shape.layers // sizes.pipeline)
    settings = _settings(model)
    stretches = virtual_stages(settings, layers=shape.layers, pipeline=sizes.pipeline)
    states = passes.tokens * shape.hidden * model.width
    mixed = -(-sum(shape.experts.layers) // sizes.pipeline) if shape.experts else 0
    sums = 2 * layers - (mixed if shape.experts and not shape.experts.shared_width else 0)
    heads = passes.tokens * (2 * shape.query_width + 2 * shape.key_value_width) // sizes.tensor * model.width
    return [
        Traffic(
            what=f"{purpose}: share matrices",
            bytes=directions * sums * 2 * states * (sizes.tensor - 1) // sizes.tensor,
            messages=directions * sums * passes.forward if sizes.tensor > 1 else 0,
            within="tensor",
        ),
        _to_experts(model, f"{purpose}: tokens to experts", settings, states, directions * mixed, passes.forward),
        Traffic(
            what=f"{purpose}: share sequences",
            bytes=directions * layers * heads * (sizes.context - 1) // sizes.context,
            messages=directions * layers * 2 * passes.forward if sizes.context > 1 else 0,
            within="sequence",
        ),
        Traffic(
            what=f"{purpose}: share layers",
            bytes=min(directions, 2) * stretches * states if sizes.pipeline > 1 else 0,
            messages=min(directions, 2) * stretches * passes.forward if sizes.pipeline > 1 else 0,
            within="pipeline",
        ),
    ]


def _settings(model: PlacedModel) -> MegatronSettings:
    """Read the options that a model is split by; the reference is split as the policy is."""
    return megatron_settings(learner_of(model.config, model.role).engine_options).settings


def _to_experts(
    model: PlacedModel, what: str, settings: MegatronSettings, states: int, layers: int, passes: int
) -> Traffic:
    """Tokens to the ranks of their experts, and the results back: to the ranks that share the experts, and within these to
    those that share one; or all tokens to all of them.

    Args: states: bytes of hidden states of all tokens on this device; layers that they go through, in every direction.
    """
    sizes, experts = model.place.sizes, model.shape.experts
    over, one_over = sizes.expert, sizes.expert_tensor
    if experts is None or over * one_over == 1:
        return Traffic(what=what, bytes=0, messages=0)
    here = states // sizes.tensor
    if settings.experts.dispatcher == "allgather":
        received, kinds = here * (over * one_over - 1), 1
    else:
        sent = here * experts.chosen
        received, kinds = sent * (over - 1) // over + sent * (one_over - 1), (over > 1) + (one_over > 1)
    return Traffic(what=what, bytes=2 * layers * received, messages=2 * layers * kinds * passes, within="data")


def _reduce_gradients(model: PlacedModel, updates: int) -> Traffic:
    """Gradients of a rank's part over its copies, once per update: a message for each of a layer's six weights, and three.

    Those of experts, two of a layer's, go over the ranks with the same part of the same experts.
    """
    shape, sizes = model.shape, model.place.sizes
    with_experts = sum(shape.experts.layers) if shape.experts else 0
    layers, mixed = (-(-count // sizes.pipeline) for count in (shape.layers, with_experts))
    width, messages = model.master_width, (6 * layers - mixed + 3, 2 * mixed)
    groups = [(each, alike, count) for (each, alike), count in zip(parts(shape, sizes), messages, strict=True)]
    return Traffic(
        what=f"{model.role}: reduce gradients",
        bytes=updates * sum(2 * each * width * (alike - 1) // alike for each, alike, _ in groups),
        messages=updates * sum(count for _, alike, count in groups if alike > 1),
        within="data",
    )


def _gather_new_weights(model: PlacedModel, updates: int) -> Traffic:
    """New weights, from the ranks that have each updated a stretch of them, where the optimizer is distributed."""
    spread = _settings(model).distributed_optimizer
    groups = [(each, alike) for each, alike in parts(model.shape, model.place.sizes) if spread and each and alike > 1]
    return Traffic(
        what=f"{model.role}: gather new weights",
        bytes=updates * sum(each * model.master_width * (alike - 1) // alike for each, alike in groups),
        messages=updates * len(groups),
        within="data",
    )
