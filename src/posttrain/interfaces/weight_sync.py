"""Interface of the weight transfer from the policy to the sampler."""

from __future__ import annotations

from typing import Protocol

from posttrain.errors import RunStopped
from posttrain.interfaces.rollout_engine import RolloutEngine, Served
from posttrain.interfaces.train_engine import TrainEngine


class WeightSync(Protocol):
    @property
    def sent_bytes(self) -> int:
        """Bytes sent to each copy of the sampler in the last transfer; 0 when it reads the policy's own weights."""
        ...

    def publish(self, policy: TrainEngine, rollout: RolloutEngine) -> None:
        """Make the sampler serve the policy's current weights and version.

        Transferred weights carry their version and content hash, and the sampler reports what it serves. Raises: RunStopped
        when the report differs.
        """
        ...


def check_served(announced: Served, reports: list[tuple[str, Served]]) -> None:
    """Raises: RunStopped when a copy of the sampler serves other weights, or no copy reports."""
    if not reports:
        raise RunStopped(f"no sampler reported that it serves the {announced}")
    for name, served in reports:
        if served != announced:
            raise RunStopped(f"{name} serves {served} after {announced} was sent to it")
