"""Profiles of what workers do in a phase: each records itself and writes a file of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.backends.runtime.ray.crew import Crew
from posttrain.backends.runtime.ray.watch import Member
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
    """See interfaces.roles.WorkersProfiler. Args: crews by the roles in them; a crew may have several."""

    def __init__(self, crews: Mapping[str, Crew], on_cuda: bool):
        self.on_cuda = on_cuda
        self._crews = crews
        self._begun: list[tuple[Crew, Member]] = []

    def begin(self, phase: str, plan: ProfilePlan) -> None:
        crews = [self._crews[role] for role in ROLES[phase] if role in self._crews]
        self._begun = [
            (crew, member)
            for crew in {id(crew): crew for crew in crews}.values()
            for rank, member in enumerate(crew.members)
            if plan.ranks is None or rank in plan.ranks
        ]
        self._call("recording.begin", {member: (plan,) for _, member in self._begun})

    def end(self, folder: Path, stem: str) -> list[str]:
        lost = [member.name for crew, member in self._begun if member not in crew.members]
        arguments = {
            member: (folder, f"{stem}_{member.name.replace(' ', '_')}")
            for crew, member in self._begun
            if member in crew.members
        }
        told = [text for texts in self._call("recording.end", arguments).values() for text in texts]
        return told + [f"{name} was started again in {stem}, which is not profiled" for name in lost]

    def _call(self, method: str, arguments: Mapping[Member, tuple[Any, ...]]) -> dict[Member, Any]:
        """Raises: RunStopped when a worker is lost."""
        found: dict[Member, Any] = {}
        for crew in {id(crew): crew for crew, _ in self._begun}.values():
            mine = [member for member in crew.members if member in arguments]
            promises = {m: crew.cluster.call(m.handle, "call", method, True, *arguments[m]) for m in mine}
            found |= crew.watch.wait(promises, method, crew.timeout_s)
        return found
