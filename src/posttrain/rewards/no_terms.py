"""The scorer of a run without reward terms, whose environments give the rewards, or which learns from teachers alone."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from posttrain.records.trajectories import Invalid, Outcome, TrajectoryGroup
from posttrain.rewards.sources import NO_REWARD


class NothingToScore:
    """A Scorer without a term. An environment's reward replaces its outcomes (steps.score). Args: why, where none does."""

    def __init__(self, why: str = "the environment gave no reward, and there is no reward term"):
        self._why = why

    def begin(self, group: TrajectoryGroup, *, keep: bool = False) -> None:
        """No-op: there is nothing to score."""

    def forget(self, groups: Sequence[TrajectoryGroup]) -> None:
        """No-op: nothing is begun."""

    def scorable(self, group: TrajectoryGroup) -> list[Future[bool]]:
        found: list[Future[bool]] = [Future() for _ in group.trajectories]
        for future in found:
            future.set_result(True)
        return found

    def score(self, groups: Sequence[TrajectoryGroup]) -> list[tuple[Outcome, ...]]:
        nothing = Invalid(NO_REWARD, self._why)
        return [(nothing,) * len(group.trajectories) for group in groups]

    def at_step(self, step: int) -> None:
        """No-op: nothing is scored."""

    def keep_in(self, folder: Path) -> None:
        """No-op: nothing is cached."""

    def take_costs(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """No-op: there is no process to end."""
