"""The answers of ``posttrain plan --on MACHINE``: the seconds of a step there, and with --propose a placement for it."""

from __future__ import annotations

from dataclasses import asdict
from json import dumps
from typing import Any

from posttrain.config import RunConfig
from posttrain.config.machine import MachineConfig
from posttrain.dialects.loaded import LoadedConfig
from posttrain.errors import ConfigError, Problem
from posttrain.plan.batch import plan_batches
from posttrain.plan.estimate import estimate, peak, role_shapes
from posttrain.plan.fit import GIB, RESERVE
from posttrain.plan.placement import PlacementPlan
from posttrain.plan.roles import place
from posttrain.plan.timing.machine_file import read_machine
from posttrain.plan.timing.proposals import Search, propose
from posttrain.plan.timing.seconds import StepTime, step_time
from posttrain.plan.timing.weight_links import WeightSyncTime, broadcast_time
from posttrain.records.batch_plans import BatchPlan

ASSUMED = (
    "sequences of full length; weights, activations and caches as in the memory table; no overlap of computing and",
    "sending; the shares of the peaks under `attained` of the machine file. Formulas: docs/scaling.md.",
)


def on_text(loaded: LoadedConfig[RunConfig], on: str, *, search: bool, as_json: bool = False) -> tuple[str, bool]:
    """Write the seconds of a step by part, or the best placements. Args: on: the value of --on; search: propose placements.

    Returns: the text, and whether the run fits into the machine's memory.
    Raises: ConfigError for a machine that cannot be read or does not fit the run, a model whose shape is not known, or a
        search that finds nothing.
    """
    if loaded.entry != "train":
        raise ConfigError(Problem(f"--on is for posttrain train; this is a configuration of posttrain {loaded.entry}"))
    config, machine = loaded.checked().config, read_machine(on)
    if "policy" not in role_shapes(config):
        what = f"the shape of {config.model.path} is not known: its config.json is not here"
        raise ConfigError(Problem(what, fix="name a local model folder", field="model.path"))
    assumed = "assumed: " + "\n  ".join(ASSUMED)
    if search:
        found = _searched(loaded, machine)
        if as_json:
            proposals = [{"settings": each.settings, "bytes": each.bytes, **_json(each.time)} for each in found.best]
            return dumps({"tried": found.tried, "proposals": proposals}, indent=2), True
        return "\n".join([*_proposals(found, on), "", assumed]), True
    plan, batches = _planned(loaded, machine, on)
    time = step_time(config, batches, plan, role_shapes(config), machine)
    memory = estimate(config, batches, plan, on_cpu=plan.device == "cpu")
    assert memory is not None, "the shape is known"
    fullest = peak(plan, memory).bytes
    fits = fullest <= _room_gib(machine) * GIB
    if as_json:
        return dumps({"bytes": fullest, "fits": fits, **_json(time)}, indent=2), fits
    used = _memory(fullest, machine) + ("" if fits else ": it does not fit; --propose looks for a placement that does")
    told = [*_parts(time), _rates(time, batches), used, *_links(time.weight_sync)]
    if time.weight_sync.links:
        told += _by_broadcast(time, broadcast_time(config, plan, role_shapes(config)["policy"], machine))
    return "\n".join([f"One step on {on}", *told, "", assumed]), fits


def _json(time: StepTime) -> dict[str, Any]:
    return {"seconds": time.seconds, **asdict(time)}


def _planned(loaded: LoadedConfig[RunConfig], machine: MachineConfig, on: str) -> tuple[PlacementPlan, BatchPlan]:
    """Place the run, which must not have more devices or nodes than the machine, and other ones only within a node."""
    plan, problems = place(loaded.config)
    batches, wrong = plan_batches(loaded.config, None)
    if plan is None or batches is None:
        raise ConfigError(loaded.locate([*problems, *wrong]))
    whole = (plan.devices, plan.nodes) == (machine.devices, machine.nodes)
    if not whole and (plan.nodes > 1 or plan.devices > machine.devices_per_node):
        what = f"the run has {_count(plan.nodes, plan.devices)}, and {on} has {_count(machine.nodes, machine.devices)}"
        fix = f"set placement.devices={machine.devices} placement.nodes={machine.nodes}, or ask with --propose"
        raise ConfigError(loaded.locate([Problem(what, fix=fix, field="placement.devices")]))
    return plan, batches


def _parts(time: StepTime) -> list[str]:
    lines = [f"  {'':<24}{'computing':>12}{'sending':>12}"]
    lines += [f"  {each.what:<24}{_seconds(each.computing):>12}{_seconds(each.sending):>12}" for each in time.parts]
    how = ", sampling beside the rest" if time.overlaps else ""
    lines.append(f"  {'step':<24}{_seconds(time.seconds):>24}{how}")
    lines += [f"  not counted: {', '.join(time.not_counted)}"] if time.not_counted else []
    return lines


def _links(sync: WeightSyncTime) -> list[str]:
    """The links of a weight sync; nothing where none is needed."""
    if not sync.links:
        return []
    lines = [
        "",
        f"New weights for the sampler in {_seconds(sync.seconds)}, by link",
        f"  {'':<46}{'GB each':>10}{'':>12}",
    ]
    for each in sync.links:
        took = "not counted" if each.seconds is None else _seconds(each.seconds)
        lines.append(f"  {f'{each.what} ({each.count} x)':<46}{each.bytes / 1e9:>10,.2f}{took:>12}")
    return lines


def _by_broadcast(time: StepTime, broadcast: WeightSyncTime | None) -> list[str]:
    """A word about the other way of sending weights, where it takes half of the time or less, and shortens the step by 1 %."""
    now = time.weight_sync.seconds
    if broadcast is None or broadcast.seconds * 2 > now or now - broadcast.seconds < time.seconds / 100:
        return []
    return [f"  a broadcast would take {_seconds(broadcast.seconds)}: rollout.weight_sync=collective"]


def _rates(time: StepTime, batches: BatchPlan) -> str:
    hourly = 3600 / time.seconds
    return f"  {hourly:,.1f} steps and {hourly * batches.sequences_per_step:,.0f} sequences an hour"


def _room_gib(machine: MachineConfig) -> float:
    return machine.memory_gib * (1 - RESERVE)


def _memory(size: int, machine: MachineConfig) -> str:
    return f"  {size / GIB:.1f} GiB on the fullest device, of {machine.memory_gib:g} ({1 - RESERVE:.0%} to be used)"


def _searched(loaded: LoadedConfig[RunConfig], machine: MachineConfig) -> Search:
    found = propose(loaded.config, machine)
    assert found is not None, "the shape is known"
    if found.best:
        return found
    if found.smallest is None:
        what = f"no placement of this run on {_count(machine.nodes, machine.devices)} works"
        fix = "give a step as many sequences as the devices can share out (data.prompts_per_step)"
    else:
        what = (
            f"nothing fits into {machine.memory_gib:g} GiB per device: of {found.tried} placements the smallest needs "
            f"{found.smallest / GIB:.1f} GiB, and {_room_gib(machine):.1f} are to be used"
        )
        fix = "shorten rollout.max_response_tokens, train an adapter (policy.lora.rank), or take more devices"
    raise ConfigError(loaded.locate([Problem(what, fix=fix)]))


def _proposals(found: Search, on: str) -> list[str]:
    lines = [f"{found.tried:,} placements on {on} were priced"]
    for number, each in enumerate(found.best, 1):
        lines += [
            "",
            f"{number}. {_seconds(each.time.seconds)} a step, {each.bytes / GIB:.1f} GiB on the fullest device",
        ]
        lines += [f"   {setting}" for setting in each.settings] or ["   as the configuration is"]
    return [*lines, "", "The first, by part", *_parts(found.best[0].time)]


def _count(nodes: int, devices: int) -> str:
    return f"{devices} device{'s' * (devices != 1)}" + (f" on {nodes} nodes" if nodes > 1 else "")


def _seconds(value: float) -> str:
    if value == 0:
        return "-"
    return f"{value:,.1f} s" if value >= 1 else f"{value * 1000:.1f} ms"
