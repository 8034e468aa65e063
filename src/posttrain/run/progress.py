"""The state of a run between two steps: everything that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from posttrain.interfaces.loader import Position
from posttrain.interfaces.train_engine import OptimizedEngine, TrainEngine, ValueEngine


class AheadOfTraining(Position, Protocol):
    """Groups that are sampled ahead. ``state`` and ``restore`` are for checkpoints, the others for a step that is left.

    ``folder`` is copied into a checkpoint where it exists, and back when the run is resumed; None: there is nothing to copy.
    """

    folder: Path | None

    def still(self) -> AbstractContextManager[None]:
        """A block in which nothing changes here, nor in the position in the data."""
        ...

    def snapshot(self) -> Any:
        """Return the state between two steps, cheaper than ``state``, for ``go_back``."""
        ...

    def go_back(self, snapshot: Any) -> None: ...

    def start_after(self, step: int) -> None:
        """Start with nothing sampled, after the steps of a synchronous run."""
        ...


Positions = tuple[Mapping[str, Any], Mapping[str, Any] | None, Any]


@dataclass(slots=True, kw_only=True)
class Progress:
    """Models, the position in the data, running statistics of the rewards, and steps without an update."""

    policy: TrainEngine
    loader: Position
    critic: ValueEngine | None = None
    process_reward: TrainEngine | None = None
    rewards: Position | None = None
    ahead: AheadOfTraining | None = None  # what an asynchronous loop has sampled for later steps
    idle_steps: int = 0  # in a row until now, without an update

    @property
    def engines(self) -> dict[str, OptimizedEngine]:
        """The engines by role, as the folders of a checkpoint are named."""
        beside = {"critic": self.critic, "process_reward": self.process_reward}
        return {"policy": self.policy} | {role: engine for role, engine in beside.items() if engine is not None}

    def positions(self) -> Positions:
        """The positions in data and statistics, for ``go_back``."""
        rewards = self.rewards.state() if self.rewards else None
        with self.still():
            return self.loader.state(), rewards, self.ahead.snapshot() if self.ahead else None

    def still(self) -> AbstractContextManager[None]:
        """A block in which what is sampled ahead does not change."""
        return self.ahead.still() if self.ahead else nullcontext()

    def go_back(self, positions: Positions) -> None:
        """Undo a step that drew data and changed no weights."""
        loader, rewards, ahead = positions
        if self.ahead:  # first: it may be drawing data
            self.ahead.go_back(ahead)
        self.loader.restore(loader)
        if self.rewards and rewards is not None:
            self.rewards.restore(rewards)
