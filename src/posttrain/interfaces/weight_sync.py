"""From the policy to the sampler."""

from __future__ import annotations

from typing import Protocol

from posttrain.interfaces.rollout_engine import RolloutEngine
from posttrain.interfaces.train_engine import TrainEngine


class WeightSync(Protocol):
    def publish(self, policy: TrainEngine, rollout: RolloutEngine) -> None:
        """Make the sampler serve the policy's current weights and version."""
        ...
