"""Find the placement and sizes with which a step takes the fewest seconds and every device has memory for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from posttrain.config import RunConfig
from posttrain.config.machine import MachineConfig
from posttrain.config.roles import needs_values, shares_weights, uses_reference
from posttrain.plan.batch import plan_batches
from posttrain.plan.engine import engine_plan, engine_that
from posttrain.plan.estimate import peak, process_reward_memory, role_memory, role_shapes
from posttrain.plan.fit import GIB, RESERVE
from posttrain.plan.roles import place
from posttrain.plan.timing.seconds import StepTime, step_time

# Parts of the devices that samplers get where they work beside the trainer.
SAMPLERS = (0.125, 0.25, 0.5, 0.75)
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)  # sequences; in tokens, times the longest sequence
STAGES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """One placement: what to set, and what it takes."""

    placement: tuple[str, ...]  # overrides
    sizes: tuple[str, ...]  # overrides
    time: StepTime
    bytes: int  # of the fullest device

    @property
    def settings(self) -> tuple[str, ...]:
        return (*self.placement, *self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Result of a search."""

    tried: int
    best: tuple[Proposal, ...]  # that fit, the fastest first
    smallest: int | None  # bytes of the fullest device in the placement that needs the least; None: none could be made


def propose(config: RunConfig, machine: MachineConfig, *, keep: int = 3) -> Search | None:
    """Try placements on all devices of ``machine``: groups that share matrices, layers and sequences, recomputed activations,
    micro-batches, sequences sampled at once; the engines and the batch sizes stay. None when the policy's shape is not known.
    """
    shapes = role_shapes(config)
    if "policy" not in shapes:
        return None
    tried, smallest, found = 0, None, []
    for settings, changed in _placements(config, machine):
        plan, problems = place(changed)
        if plan is None or problems:
            continue
        for more, sized in _sizes(changed):
            batches, wrong = plan_batches(sized, None)
            if batches is None or wrong:
                continue
            tried += 1
            memory = [
                role_memory(sized, batches, each, shapes[each.role], on_cpu=plan.device == "cpu")
                for each in plan.roles
                if each.ranks and each.role in shapes
            ]
            process = process_reward_memory(sized, plan)
            fullest = peak(plan, memory if process is None else [*memory, process]).bytes
            smallest = min(fullest, smallest or fullest)
            if fullest <= machine.memory_gib * GIB * (1 - RESERVE):
                time = step_time(sized, batches, plan, shapes, machine)
                found.append(Proposal(placement=settings, sizes=more, time=time, bytes=fullest))
    # Of placements that take as long, the one that changes least and has most room.
    found.sort(key=lambda one: (round(one.time.seconds, 3), one.bytes))
    return Search(tried=tried, best=_unlike(found, keep), smallest=smallest)


def _placements(config: RunConfig, machine: MachineConfig) -> Iterator[tuple[tuple[str, ...], RunConfig]]:
    """Yield the settings of every placement worth pricing, with the configuration that has them."""
    engine = config.policy.engine
    if machine.devices > 1 and not engine_plan(engine).shares_out:
        engine = engine_that(lambda each: each.shares_out)
    can = engine_plan(engine)
    near = [size for size in STAGES if size <= machine.devices_per_node]
    tensors = near if can.splits_layers else [1]
    pipelines = [size for size in STAGES if size <= machine.devices] if can.splits_layers else [1]
    sequences = near if can.splits_sequences else [1]
    samplers = [1] if shares_weights(config.rollout.engine) else near
    shardings = can.shardings(machine.devices_per_node) if machine.nodes > 1 else ({},)
    for tensor, pipeline, sequence, sampler, options, lists in product(
        tensors, pipelines, sequences, samplers, shardings, _devices(config, machine)
    ):
        learner = {
            "tensor_parallel": tensor,
            "pipeline_parallel": pipeline,
            "sequence_parallel": sequence,
            "engine": engine,
        }
        changes = {
            "placement": {"devices": machine.devices, "nodes": machine.nodes, "runtime": "auto"},
            "policy": learner | {"devices": lists["policy"]},
            "rollout": {"tensor_parallel": sampler, "devices": lists["rollout"]},
        }
        if needs_values(config):
            changes["critic"] = learner | {"devices": lists["policy"]}
        if uses_reference(config):
            changes["reference"] = {"devices": lists["policy"]}
        if options:
            for role in ("policy", "critic", "reference"):
                if role in changes:
                    changes[role] = changes[role] | {
                        "engine_options": {**getattr(config, role).engine_options, **options}
                    }
        yield tuple(_written(config, changes)), _changed(config, changes)


def _devices(config: RunConfig, machine: MachineConfig) -> Iterator[dict[str, list[int] | None]]:
    """Yield who is where: all roles everywhere, or samplers beside the trainer."""
    if config.asynchronous.mode != "separate":
        yield {"policy": None, "rollout": None}
        return
    for share in SAMPLERS:
        count = round(machine.devices * share)
        if 0 < count < machine.devices:
            first = machine.devices - count
            yield {"policy": list(range(first)), "rollout": list(range(first, machine.devices))}


def _sizes(config: RunConfig) -> Iterator[tuple[tuple[str, ...], RunConfig]]:
    """Yield sizes within a placement: micro-batches, recomputed activations, sequences sampled at once."""
    longest = config.context_tokens + config.rollout.max_response_tokens
    wanted = config.rollout.max_concurrent_sequences
    for recompute, micro, together in product(
        (False, True), MICRO_BATCHES, sorted({wanted, max(1, wanted // 4), wanted * 4}, reverse=True)
    ):
        size: dict[str, Any] = {"sequences_per_micro_batch_per_device": micro}
        if config.policy.max_tokens_per_micro_batch is not None:
            size = {"max_tokens_per_micro_batch": micro * longest}
        changes = {
            "model": {"gradient_checkpointing": recompute},
            "policy": size,
            "rollout": {"max_concurrent_sequences": together},
        }
        if needs_values(config):
            changes["critic"] = dict(size)
        yield tuple(_written(config, changes)), _changed(config, changes)


def _changed(config: RunConfig, changes: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    sections = {name: getattr(config, name).model_copy(update=dict(values)) for name, values in changes.items()}
    return config.model_copy(update=sections)


def _written(config: RunConfig, changes: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the overrides that make these changes; what the configuration has already is left out."""
    for section, values in changes.items():
        for name, value in values.items():
            if getattr(getattr(config, section), name) != value:
                yield from _override(f"{section}.{name}", value)


def _override(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _override(f"{key}.{name}", inner)
    else:
        text = {None: "null", True: "true", False: "false"}.get(value, value) if not isinstance(value, list) else value
        yield f"{key}={str(text).replace(' ', '')}"


def _unlike(found: Iterable[Proposal], keep: int) -> tuple[Proposal, ...]:
    """Keep the fastest of every placement, and of those so many."""
    chosen: dict[tuple[str, ...], Proposal] = {}
    for each in found:
        chosen.setdefault(each.placement, each)
        if len(chosen) == keep:
            break
    return tuple(chosen.values())
