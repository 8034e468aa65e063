"""The placement of a run: a plain, frozen value that is printed, checked and built from. Made by ``plan.roles.place``.

Devices have numbers over the whole run, 0 first; node n has those from n x devices_per_node on. A role (policy, critic,
reference, reward model, rollout) has one rank on each of its devices, numbered from 0 in the order of its devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

# What a step does, in order, and what a role can be awake for.
Phase = Literal["rollout", "reward", "log-probs", "values", "update"]
PHASES: tuple[Phase, ...] = get_args(Phase)
# Ways to split a role over its ranks. data, tensor, sequence (with context) and pipeline multiply to the number of ranks;
# shard and replica multiply to it, too: they are FSDP's view of the same ranks.
Axis = Literal["data", "tensor", "pipeline", "sequence", "shard", "replica"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A process of a role."""

    rank: int  # in its role
    device: int  # in the run
    node: int
    local_device: int  # on its node


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSizes:
    """Ranks in one group of each kind."""

    data: int = 1  # copies of the model: each works on other sequences
    tensor: int = 1  # share one layer's matrices
    pipeline: int = 1  # share the layers
    sequence: int = 1  # share one sequence, and exchange heads (Ulysses)
    context: int = 1  # share one sequence, and pass keys and values around (Megatron)
    expert: int = 1  # share the experts; taken from the ranks of a stage, so it divides nothing
    expert_tensor: int = 1  # share one expert's matrices
    shard: int = 1  # keep one copy of parameters, gradients and optimizer state together (FSDP, ZeRO)

    @property
    def per_copy(self) -> int:
        """Ranks that work on the same sequences."""
        return self.tensor * self.pipeline * self.sequence * self.context


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlacement:
    """One role's place."""

    role: str  # policy, critic, reference, reward model, rollout
    engine: str
    ranks: tuple[Rank, ...]
    sizes: GroupSizes
    awake: tuple[Phase, ...]
    rests: tuple[str, ...] = ()  # what leaves the device in other phases: weights, optimizer, cache
    shared_with: tuple[str, ...] = ()  # roles on some of the same devices
    uses_weights_of: str | None = None  # a role whose weights it reads, so that it has none of its own

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(rank.device for rank in self.ranks)

    @property
    def copies(self) -> int:
        return self.sizes.data

    @property
    def devices_per_copy(self) -> int:
        return self.sizes.per_copy

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """The ranks of the role in groups of one kind; every rank is in exactly one.

        Neighbours share a tensor-parallel group, then a sequence, then a stage's copies, then the pipeline: what talks most
        is nearest (arXiv:2104.04473, section 3.1; the order of Megatron-LM). Shards are neighbours, replicas are not.
        """
        sizes, count = self.sizes, len(self.ranks)
        together = sizes.sequence * sizes.context
        strides = {
            "tensor": (1, sizes.tensor),
            "sequence": (sizes.tensor, together),
            "data": (sizes.tensor * together, sizes.data),
            "pipeline": (sizes.tensor * together * sizes.data, sizes.pipeline),
            "shard": (1, sizes.shard),
            "replica": (sizes.shard, count // sizes.shard),
        }
        stride, size = strides[axis]
        firsts = [rank for rank in range(count) if rank // stride % size == 0]
        return tuple(tuple(first + stride * step for step in range(size)) for first in firsts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Devices with the same roles on them."""

    devices: tuple[int, ...]
    roles: tuple[str, ...]  # in the order a step needs them; several take turns


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """The whole run."""

    runtime: Literal["inprocess", "ray"]
    device: str  # auto, cpu, cuda
    nodes: int
    devices: int
    roles: tuple[RolePlacement, ...]  # in the order a step needs them

    @property
    def devices_per_node(self) -> int:
        return self.devices // self.nodes

    def role(self, name: str) -> RolePlacement | None:
        """Return the placement of a role; None when the run has no such role."""
        return next((role for role in self.roles if role.role == name), None)

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The devices by what is on them. Devices that no role uses are in none."""
        on: dict[int, list[str]] = {}
        for role in self.roles:
            for device in role.devices:
                on.setdefault(device, []).append(role.role)
        members: dict[tuple[str, ...], list[int]] = {}
        for device in sorted(on):
            members.setdefault(tuple(on[device]), []).append(device)
        return tuple(Pool(devices=tuple(devices), roles=roles) for roles, devices in members.items())

    @property
    def idle(self) -> tuple[int, ...]:
        """Devices that no role uses."""
        used = {device for role in self.roles for device in role.devices}
        return tuple(device for device in range(self.devices) if device not in used)

    def asleep(self, phase: Phase) -> tuple[str, ...]:
        """Roles that have left their devices' memory, in part or whole, while a phase lasts."""
        return tuple(role.role for role in self.roles if role.rests and phase not in role.awake)
