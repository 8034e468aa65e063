"""The parts of a plan about devices: placement of the models, phases in which they make room, and memory."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.plan.estimate import peak
from posttrain.plan.memory import RoleMemory
from posttrain.plan.placement import PlacementPlan, RolePlacement
from posttrain.plan.traffic import Traffic

GIB = 1024**3
# Groups that form a copy, in words, from the fastest-changing rank dimension to the slowest.
GROUPS = {
    "tensor": "share matrices",
    "sequence": "share a sequence",
    "context": "share a sequence",
    "pipeline": "share the layers",
}


def devices_text(plan: PlacementPlan) -> str:
    """Describe each role in one or more lines: its devices, copies, groups, and the phases in which it is awake."""
    total = f"{plan.devices} device{'s' if plan.devices > 1 else ''}"
    nodes = f" on {plan.nodes} nodes" if plan.nodes > 1 else ""
    runtime = f", by {plan.runtime}" if plan.devices > 1 or plan.runtime != "inprocess" else ""
    lines = [f"Devices: {total}{nodes}, {plan.device}{runtime}"]
    for role in plan.roles:
        lines.append(f"  {role.role:<13}{_numbers(role.devices):<10}{_copies(role)}; awake in {', '.join(role.awake)}")
        lines += [f"{'':<25}{more}" for more in _further(role, plan.devices)]
    if plan.idle:
        lines.append(f"  {'(no role)':<13}{_numbers(plan.idle)}")
    return "\n".join(lines)


def memory_text(memory: Sequence[RoleMemory] | None, plan: PlacementPlan, model: str) -> str:
    """Format a table of GiB per device, and the largest sum on one device."""
    if memory is None:
        return f"Memory per device: not estimated (no config.json to read in {model})"
    lines = [
        "Memory per device, GiB (estimate)",
        f"  {'':<13}{'weights':>9}{'packed':>8}{'optimizer':>11}{'gathered':>10}{'activations':>13}{'cache':>8}{'on host':>9}",
    ]
    for role in memory:
        sizes = role.weights, role.packed, role.optimizer, role.gathered, role.activations, role.cache, role.host
        cells = "".join(f"{_gib(size):>{width}}" for size, width in zip(sizes, (9, 8, 11, 10, 13, 8, 9), strict=True))
        lines.append(f"  {role.role:<13}{cells}")
    fullest = peak(plan, list(memory))
    lines.append(f"  at most {_gib(fullest.bytes)} on device {fullest.device}, in {fullest.phase}")
    return "\n".join(lines)


def traffic_text(traffic: Sequence[Traffic]) -> str:
    """Describe the bytes that a device of the policy receives per step, by purpose."""
    lines = ["Sent per device and step (docs/scaling.md has the formulas)"]
    lines += [f"  {each.what:<44}{_size(each.bytes):>12}{each.messages:>12,} x" for each in traffic]
    return "\n".join(lines)


def _copies(role: RolePlacement) -> str:
    if not role.ranks:
        return f"{role.copies} server{'s' * (role.copies > 1)} outside of the run"
    if role.uses_weights_of:
        return f"the {role.uses_weights_of}'s own weights"
    each = f", {role.devices_per_copy} devices each" if role.devices_per_copy > 1 else ""
    return f"{role.copies} cop{'ies' if role.copies > 1 else 'y'}{each}"


def _further(role: RolePlacement, devices: int) -> list[str]:
    lines = []
    sizes = [(getattr(role.sizes, name), words) for name, words in GROUPS.items()]
    groups = [f"{size} {words}" for size, words in sizes if size > 1]
    if role.sizes.expert > 1:
        groups.append(f"{role.sizes.expert} share the experts")
    if role.sizes.expert_tensor > 1 and role.sizes.expert_tensor != role.sizes.tensor:
        groups.append(f"{role.sizes.expert_tensor} share each expert")
    if role.sizes.shard > 1:
        replicas = len(role.groups("shard"))
        groups.append(f"weights in parts over {role.sizes.shard}" + (f", {replicas} times" if replicas > 1 else ""))
    if groups:
        lines.append("; ".join(groups))
    if role.shared_with and devices > 1:
        works = f"while {_and(role.shared_with)} work{'s' * (len(role.shared_with) == 1)}"
        room = f"makes room ({', '.join(role.rests)}) {works}" if role.rests else f"stays in memory {works}"
        lines.append(room)
    return lines


def _size(count: int) -> str:
    for unit, name in ((GIB, "GiB"), (1024**2, "MiB"), (1024, "KiB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count} B"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}" if size else "-"


def _numbers(devices: Sequence[int]) -> str:
    """Format 0 1 2 3 8 9 10 11 as 0-3,8-11."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) or "none"


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
