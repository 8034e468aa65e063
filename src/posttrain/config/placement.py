"""Devices of a run, and the runtime that starts its processes. Each role names its own devices (policy.devices)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from posttrain.config.base import Section

MOST_DEVICES = 100_000  # of the largest cluster; more is a mistake, not a request


class PlacementConfig(Section):
    runtime: Literal["auto", "inprocess", "ray"] = "auto"
    """Runtime of the models: inprocess has one device and one process, ray one process per device and role; auto is inprocess on
    one device and ray on more."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Type of the devices; auto uses an accelerator when there is one."""
    devices: int = Field(default=1, ge=1, le=MOST_DEVICES)
    """Devices of the run, on all nodes together; on a CPU, processes."""
    nodes: int = Field(default=1, ge=1, le=MOST_DEVICES)
    """Machines that the devices are spread over evenly."""
    cpu_threads: int | None = Field(default=None, ge=1, le=10_000)
    """Threads of a CPU run (with ray, of each worker); null means as many as OMP_NUM_THREADS says or else one per core this
    process may use (with ray, a share of the node's cores)."""
    ray_address: str | None = None
    """Ray cluster to run on (host:port; auto: the one this machine belongs to); null starts one on this machine for the run."""
    start_timeout_s: float = Field(default=300.0, gt=0.0)
    """Time that a cluster of the run's own has to start, and workers to be placed, to start and to load their models."""
    call_timeout_s: float = Field(default=3600.0, gt=0.0)
    """Time that a worker has for one call, such as sampling a step or a mini-batch; the run stops when it is over."""
