"""The scorer of a run whose environments give the rewards: it has nothing to say itself."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from posttrain.records.trajectories import Invalid, Outcome, TrajectoryGroup
from posttrain.rewards.sources import NO_REWARD


class NothingToScore:
    """A Scorer without a term. What an environment gives takes the place of its outcomes (steps.score)."""

    def begin(self, group: TrajectoryGroup) -> None:
        """Nothing."""

    def hopeful(self, group: TrajectoryGroup) -> list[Future[bool]]:
        found: list[Future[bool]] = [Future() for _ in group.trajectories]
        for future in found:
            future.set_result(True)
        return found

    def score(self, groups: Sequence[TrajectoryGroup]) -> list[tuple[Outcome, ...]]:
        nothing = Invalid(NO_REWARD, "the environment gave no reward, and there is no reward term")
        return [(nothing,) * len(group.trajectories) for group in groups]

    def keep_in(self, folder: Path) -> None:
        """Nothing is kept."""

    def take_costs(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """There is nothing to end."""
