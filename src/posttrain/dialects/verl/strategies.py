"""verl's strategies: its words for training engines, by which it decides whose keys it reads."""

from __future__ import annotations

from dataclasses import dataclass

MEGATRON = "megatron"
MINDSPEED = "mindspeed"  # a subclass of verl's engine of Megatron for Ascend devices
SHARDED = ("fsdp", "fsdp2")
SHARDED_TEXT = "the strategies fsdp and fsdp2"
VEOMNI, TORCHTITAN, TURBO = "veomni", "torchtitan", "fsdp_turbo"
_TURBO_SIZES = "turbo_config.distributed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """An engine of verl that shards weights as FSDP2 does, and is trained by the engines here that do. Keys are below its
    section: of the strategy's name in a role, or that of the role's sharding."""

    section: str  # "" for that of SECTIONS
    sequence: str  # devices that share a sequence
    layer: str = ""  # devices that share a layer
    layers: str = ""  # devices that share the layers


SECTIONS = {"policy": "fsdp_config", "critic": "fsdp"}  # of the sharding of a role
OTHERS = {
    VEOMNI: Sharding(section=VEOMNI, sequence="ulysses_parallel_size"),
    TORCHTITAN: Sharding(
        section=TORCHTITAN,
        sequence="context_parallel_size",
        layer="tensor_parallel_size",
        layers="pipeline_parallel_size",
    ),
    TURBO: Sharding(
        section="", sequence=f"{_TURBO_SIZES}.ulysses_parallel_size", layer=f"{_TURBO_SIZES}.tensor_parallel_size"
    ),
}
