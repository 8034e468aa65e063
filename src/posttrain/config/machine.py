"""A machine file: the devices that ``posttrain plan --on FILE`` computes the seconds of a step for."""

from __future__ import annotations

from pydantic import Field

from posttrain.config.base import Section


class AttainedConfig(Section):
    """Shares of the machine's peaks that programs reach. The defaults are usual for dense models in bfloat16."""

    training: float = Field(default=0.4, gt=0.0, le=1.0)
    """Share of the arithmetic in passes with gradients (model FLOPs utilisation, arXiv:2204.02311, appendix B)."""
    scoring: float = Field(default=0.5, gt=0.0, le=1.0)
    """Share of the arithmetic in passes without gradients and over prompts."""
    decoding: float = Field(default=0.6, gt=0.0, le=1.0)
    """Share of the memory's bandwidth while responses are sampled."""
    links: float = Field(default=0.75, gt=0.0, le=1.0)
    """Share of the bandwidth between devices."""


class MachineConfig(Section):
    """Nodes of equal devices. All numbers are of one device and one direction."""

    nodes: int = Field(default=1, ge=1)
    """Machines."""
    devices_per_node: int = Field(ge=1)
    """Devices of each."""
    tflops: float = Field(gt=0.0)
    """Peak arithmetic of a device in 10^12 FLOP/s, in the dtype of model.compute_dtype, without sparsity."""
    memory_gib: float = Field(gt=0.0)
    """Memory of a device."""
    memory_gb_s: float = Field(gt=0.0)
    """Bandwidth of a device's memory in 10^9 bytes/s."""
    link_gb_s: float = Field(gt=0.0)
    """Bandwidth between the devices of a node in 10^9 bytes/s."""
    network_gb_s: float | None = Field(default=None, gt=0.0)
    """Bandwidth from a device to another node in 10^9 bytes/s; needed with several nodes."""
    host_gb_s: float = Field(default=32.0, gt=0.0)
    """Bandwidth between a device and its node's memory in 10^9 bytes/s: of PCIe 4.0 x16 unless given."""
    latency_us: float = Field(default=10.0, ge=0.0)
    """Time that a message takes besides its bytes, in microseconds."""
    driver_gb_s: float = Field(default=1.0, gt=0.0)
    """Bytes that the driver packs, sends and unpacks in 10^9 bytes/s, for all devices together."""
    attained: AttainedConfig = AttainedConfig()

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node
