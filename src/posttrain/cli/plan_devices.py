"""The parts of a plan that are about devices: which model sits where, when it sleeps, and what memory that takes."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.config import RunConfig
from posttrain.placement.memory import RoleMemory
from posttrain.placement.roles import RolePlacement

GIB = 1024**3


def devices_text(config: RunConfig, roles: Sequence[RolePlacement]) -> str:
    """One line per role: its devices, copies, and when it is awake."""
    place = config.placement
    total = f"{place.devices} device{'s' if place.devices > 1 else ''}"
    nodes = f" on {place.nodes} nodes" if place.nodes > 1 else ""
    lines = [f"Devices: {total}{nodes}, {place.device}"]
    for role in roles:
        each = f", {role.devices_per_copy} devices each" if role.devices_per_copy > 1 else ""
        copies = f"{role.copies} cop{'ies' if role.copies > 1 else 'y'}{each}"
        shares = config.rollout.engine == "native" and role.role == "rollout" and place.devices == 1
        copies = "the policy's own weights" if shares else copies
        lines.append(f"  {role.role:<13}{_numbers(role.devices):<10}{copies}; awake in {role.awake}")
        if role.shared_with and place.devices > 1:
            works = "works" if len(role.shared_with) == 1 else "work"
            lines.append(f"{'':<25}sleeps while {_and(role.shared_with)} {works}")
    return "\n".join(lines)


def memory_text(memory: Sequence[RoleMemory] | None, roles: Sequence[RolePlacement], model: str) -> str:
    """A table of GiB per device, and the largest sum on one device."""
    if memory is None:
        return f"Memory per device: not estimated (no config.json to read in {model})"
    lines = [
        "Memory per device, GiB (estimate)",
        f"  {'':<13}{'weights':>9}{'optimizer':>11}{'activations':>13}{'cache':>8}",
    ]
    for role in memory:
        cells = f"{_gib(role.weights):>9}{_gib(role.optimizer):>11}{_gib(role.activations):>13}{_gib(role.cache):>8}"
        lines.append(f"  {role.role:<13}{cells}")
    by_role = {role.role: role.total for role in memory}
    devices = sorted({device for role in roles for device in role.devices})
    sums = {device: sum(by_role.get(role.role, 0) for role in roles if device in role.devices) for device in devices}
    fullest = max(devices, key=lambda device: sums[device])
    lines.append(f"  together {_gib(sums[fullest]).strip()} on device {fullest} if none sleeps")
    return "\n".join(lines)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}" if size else "-"


def _numbers(devices: Sequence[int]) -> str:
    if len(devices) > 1 and list(devices) == list(range(devices[0], devices[-1] + 1)):
        return f"{devices[0]}-{devices[-1]}"
    return ",".join(map(str, devices))


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
