"""Accelerators by name: peaks per device and direction, as their makers' data sheets give them."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import NamedTuple

from posttrain.config.machine import MachineConfig
from posttrain.errors import ConfigError, Problem


class Accelerator(NamedTuple):
    tflops: float  # dense bfloat16
    memory_gib: float
    memory_gb_s: float
    link_gb_s: float  # within a node: NVLink, Infinity Fabric, or PCIe 4.0 x16
    network_gb_s: float  # the adapter that usually comes with it: 400 or 200 Gbit/s
    host_gb_s: float  # PCIe 4.0 or 5.0 x16


ACCELERATORS = {
    "A100": Accelerator(312, 80, 2039, 300, 25, 32),
    "A100-40": Accelerator(312, 40, 1555, 300, 25, 32),
    "A800": Accelerator(312, 80, 2039, 200, 25, 32),
    "H100": Accelerator(989, 80, 3350, 450, 50, 64),
    "H800": Accelerator(989, 80, 3350, 200, 50, 64),
    "H20": Accelerator(148, 96, 4000, 450, 50, 64),
    "H200": Accelerator(989, 141, 4800, 450, 50, 64),
    "B200": Accelerator(2250, 180, 8000, 900, 50, 64),
    "L4": Accelerator(121, 24, 300, 32, 12.5, 32),
    "L40S": Accelerator(362, 48, 864, 32, 25, 32),
    "RTX4090": Accelerator(165, 24, 1008, 32, 12.5, 32),
    "MI300X": Accelerator(1307, 192, 5300, 448, 50, 64),
}
_SHAPE = re.compile(r"(?:(?P<nodes>\d+)x)?(?P<devices>\d+)x(?P<name>[A-Za-z].*)")


def machine_named(text: str) -> MachineConfig | None:
    """Read ``8xH100`` (one node) or ``64x8xH100`` (nodes x devices of a node); None for a text of another form.

    Raises: ConfigError for a count of 0 or an accelerator that is not in the table.
    """
    match = _SHAPE.fullmatch(text)
    if match is None:
        return None
    name, nodes, devices = match["name"], int(match["nodes"] or 1), int(match["devices"])
    found = {known.lower(): one for known, one in ACCELERATORS.items()}.get(name.lower())
    if found is None:
        near = get_close_matches(name.upper(), ACCELERATORS, n=1)
        fix = f"did you mean {near[0]}? " if near else ""
        fix += f"Known: {', '.join(ACCELERATORS)}; or write its numbers into a machine file (docs/scaling.md)"
        raise ConfigError(Problem(f"--on {text}: no accelerator is called {name} here", fix=fix))
    if not nodes or not devices:
        raise ConfigError(
            Problem(f"--on {text} has no device", fix="write nodes x devices of a node, such as 4x8xH100")
        )
    return MachineConfig(
        nodes=nodes,
        devices_per_node=devices,
        tflops=found.tflops,
        memory_gib=found.memory_gib,
        memory_gb_s=found.memory_gb_s,
        link_gb_s=found.link_gb_s,
        network_gb_s=found.network_gb_s,
        host_gb_s=found.host_gb_s,
    )
