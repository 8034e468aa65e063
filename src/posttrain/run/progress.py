"""The state of a run between two steps: everything that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.interfaces.loader import Position
from posttrain.interfaces.train_engine import OptimizedEngine, TrainEngine, ValueEngine

Positions = tuple[Mapping[str, Any], Mapping[str, Any] | None]


@dataclass(slots=True, kw_only=True)
class Progress:
    """Models, the position in the data, running statistics of the rewards, and steps without an update."""

    policy: TrainEngine
    loader: Position
    critic: ValueEngine | None = None
    rewards: Position | None = None
    idle_steps: int = 0  # in a row until now, without an update

    @property
    def engines(self) -> dict[str, OptimizedEngine]:
        """The engines by role, as the folders of a checkpoint are named."""
        return {"policy": self.policy} | ({"critic": self.critic} if self.critic else {})

    def positions(self) -> Positions:
        """The positions in data and statistics, for ``go_back``."""
        return self.loader.state(), self.rewards.state() if self.rewards else None

    def go_back(self, positions: Positions) -> None:
        """Undo a step that drew data and changed no weights."""
        loader, rewards = positions
        self.loader.restore(loader)
        if self.rewards and rewards is not None:
            self.rewards.restore(rewards)
