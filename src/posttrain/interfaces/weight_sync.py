"""From the policy to the sampler."""

from __future__ import annotations

from typing import Protocol

from posttrain.errors import RunStopped
from posttrain.interfaces.rollout_engine import RolloutEngine, Served
from posttrain.interfaces.train_engine import TrainEngine


class WeightSync(Protocol):
    @property
    def sent_bytes(self) -> int:
        """Of the weights that each copy of the sampler was sent last; 0 where it reads the policy's own."""
        ...

    def publish(self, policy: TrainEngine, rollout: RolloutEngine) -> None:
        """Make the sampler serve the policy's current weights and version.

        Where weights travel, they carry their version and the hash of their content, and the sampler says what it serves
        afterwards. Raises: RunStopped when that is something else.
        """
        ...


def check_served(announced: Served, reports: list[tuple[str, Served]]) -> None:
    """Raises: RunStopped when a copy of the sampler says that it serves something else, or nobody says anything."""
    if not reports:
        raise RunStopped(f"no sampler says that it has taken the {announced}")
    for name, served in reports:
        if served != announced:
            raise RunStopped(f"{name} serves {served} after {announced} was sent to it")
