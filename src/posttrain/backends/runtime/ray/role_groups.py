"""Groups of roles that share workers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from posttrain.config.roles import shares_weights
from posttrain.config.served_model import REWARD_SERVER
from posttrain.plan.placement import PlacementPlan, Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleGroup:
    """Roles with the same ranks: a worker per rank."""

    roles: tuple[str, ...]
    ranks: tuple[Rank, ...]
    together: bool  # the ranks meet in torch.distributed; False: each is on its own
    share: int = (
        1  # ranks of one copy of the sampler: the first has the server, and the others keep their devices for it
    )

    @property
    def leading(self) -> tuple[Rank, ...]:
        """Ranks that receive the driver's calls."""
        return self.ranks[:: self.share]

    def machines(self, leading: Rank) -> list[tuple[Rank, ...]]:
        """Return the ranks of a copy of the sampler by their nodes, its first rank first."""
        ranks = self.ranks[leading.rank : leading.rank + self.share]
        return [tuple(of_node) for _, of_node in groupby(ranks, key=lambda rank: rank.node)]

    @property
    def spans_nodes(self) -> bool:
        """True where a copy of the sampler lies on several nodes."""
        return any(len(self.machines(first)) > 1 for first in self.leading)

    @property
    def name(self) -> str:
        return "trainer" if "policy" in self.roles else self.roles[0]

    def worker(self, rank: Rank) -> str:
        """Return the name of a rank's worker."""
        return f"{self.name} rank {rank.rank}"


def groups_of(plan: PlacementPlan) -> list[RoleGroup]:
    """The workers of a plan: those of the policy first; for each copy of a model that reward functions ask; a sampler on other
    devices, or with a server's copy of the weights, last."""
    by_devices: dict[tuple[int, ...], list[str]] = {}
    policy, rollout = plan.role("policy"), plan.role("rollout")
    assert policy is not None
    server = plan.role(REWARD_SERVER)
    apart = rollout is not None and (rollout.devices != policy.devices or not shares_weights(rollout.engine))
    for role in plan.roles:
        if role is not server and (role is not rollout or not apart):
            by_devices.setdefault(role.devices, []).append(role.role)
    ordered = sorted(by_devices, key=lambda devices: devices != policy.devices)
    ranks = {role.devices: role.ranks for role in plan.roles}
    groups = [RoleGroup(roles=tuple(by_devices[each]), ranks=ranks[each], together=True) for each in ordered]
    if server is not None:
        copies = RoleGroup(roles=(REWARD_SERVER,), ranks=server.ranks, together=False, share=server.devices_per_copy)
        groups.append(copies)
    if apart and rollout is not None and rollout.ranks:
        share = rollout.devices_per_copy
        groups.append(RoleGroup(roles=("rollout",), ranks=rollout.ranks, together=False, share=share))
    return groups
