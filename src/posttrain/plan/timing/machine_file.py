"""The value of --on: a machine by name, or a file with its numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from posttrain.config.machine import MachineConfig
from posttrain.config.reading.compose import compose
from posttrain.config.reading.validate import validate
from posttrain.errors import ConfigError, Problem
from posttrain.plan.timing.accelerators import machine_named


def read_machine(text: str) -> MachineConfig:
    """Read ``64x8xH100`` or the path of a YAML file. Raises: ConfigError with the file's line and key."""
    named = None if Path(text).is_file() else machine_named(text)
    if named is not None:
        return named
    composed = compose(text, ())
    machine, problems = validate(composed.values, composed.sources, MachineConfig)
    if problems:  # the command line's overrides are of the run
        raise ConfigError([replace(each, fix=each.fix.partition(", or add ")[0]) for each in problems])
    if machine.nodes > 1 and machine.network_gb_s is None:
        what = f"network_gb_s is missing, and the machine has {machine.nodes} nodes"
        fix = "write the bandwidth from one device to another node, in 10^9 bytes/s"
        raise ConfigError(Problem(what, where=composed.sources.where("nodes"), fix=fix))
    return machine
