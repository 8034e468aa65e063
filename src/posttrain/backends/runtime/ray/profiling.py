"""Profiles of what workers do in a phase: each records itself and writes a file of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.backends.runtime.ray.watch import Member
from posttrain.backends.runtime.ray.worker_group import WorkerGroup
from posttrain.records.plans import ProfilePlan

# The roles that are at work in a phase.
ROLES = {
    "rollout": ("rollout",),
    "reward": ("reward model",),
    "baseline": ("rollout", "reward model"),
    "logprobs": ("policy", "reference"),
    "values": ("critic",),
    "critic_update": ("critic",),
    "update": ("policy",),
    "weight_sync": ("policy", "rollout"),
    "validation": ("rollout", "reward model", "policy"),
    "validation_loss": ("policy",),
}


class RayProfiler:
    """See interfaces.roles.WorkersProfiler. Args: worker_groups by the roles in them; a workers may have several."""

    def __init__(self, worker_groups: Mapping[str, WorkerGroup], on_cuda: bool):
        self.on_cuda = on_cuda
        self._crews = worker_groups
        self._begun: list[tuple[WorkerGroup, Member]] = []

    def begin(self, phase: str, plan: ProfilePlan) -> None:
        worker_groups = [self._crews[role] for role in ROLES[phase] if role in self._crews]
        self._begun = [
            (workers, member)
            for workers in {id(workers): workers for workers in worker_groups}.values()
            for rank, member in enumerate(workers.members)
            if plan.ranks is None or rank in plan.ranks
        ]
        self._call("recording.begin", {member: (plan,) for _, member in self._begun})

    def end(self, folder: Path, stem: str) -> list[str]:
        lost = [member.name for workers, member in self._begun if member not in workers.members]
        arguments = {
            member: (folder, f"{stem}_{member.name.replace(' ', '_')}")
            for workers, member in self._begun
            if member in workers.members
        }
        told = [text for texts in self._call("recording.end", arguments).values() for text in texts]
        return told + [f"{name} was started again in {stem}, which is not profiled" for name in lost]

    def _call(self, method: str, arguments: Mapping[Member, tuple[Any, ...]]) -> dict[Member, Any]:
        """Raises: RunStopped when a worker is lost."""
        found: dict[Member, Any] = {}
        for workers in {id(workers): workers for workers, _ in self._begun}.values():
            mine = [member for member in workers.members if member in arguments]
            promises = {m: workers.cluster.call(m.handle, "call", method, True, *arguments[m]) for m in mine}
            found |= workers.watch.wait(promises, method, workers.timeout_s)
        return found
