"""Which devices a run uses."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from posttrain.config.base import Section


class PlacementConfig(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes an accelerator when there is one."""
    devices: int = Field(default=1, ge=1)
    """Devices of the run, on all nodes together."""
    nodes: int = Field(default=1, ge=1)
    """Machines that the devices are spread over evenly."""
    cpu_threads: int | None = Field(default=None, ge=1)
    """Threads of a CPU run; null means one per core this process may use."""
