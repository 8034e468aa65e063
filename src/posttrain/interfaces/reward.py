"""Interface of rewards: a response gets a number, or a typed failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from posttrain.errors import PosttrainError
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Outcome, TrajectoryGroup


class NotScored(PosttrainError):
    """A reward failed for a reason with a value of its own in Invalid.reason."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason


class RewardFn(Protocol):
    """One term of the reward."""

    def __call__(self, prompt: Prompt, response: str) -> float | Mapping[str, object]:
        """Score one response. Returns: the score, or a mapping with it under "score" and other values. May raise: the caller
        records an Invalid outcome."""
        ...


class BatchedRewardFn(Protocol):
    """One term of the reward, called with many responses."""

    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Sequence[float | Mapping[str, object]]:
        """Score many responses, each as RewardFn does. May raise."""
        ...


class GroupScorer(Protocol):
    """All reward terms together, applied to groups."""

    def begin(self, group: TrajectoryGroup, *, keep: bool = False) -> None:
        """Start scoring a complete group in the background, where that is possible. ``score`` finds it again by this object; the
        next ``score`` drops what was begun for it and is not wanted, except with ``keep``, which is for later ones. May be
        called in another thread than the other methods."""

    def score(self, groups: Sequence[TrajectoryGroup]) -> list[tuple[Outcome, ...]]:
        """Return, per group, an outcome per response, in order; the same with and without earlier calls of ``begin``. Bad
        responses and failing graders raise nothing."""
        ...

    def forget(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Drop groups that were begun and will not be scored."""

    def at_step(self, step: int) -> None:
        """Tell the number of the training step, from 1, to rewards that take it; validation counts to the step before it."""

    def keep_in(self, folder: Path) -> None:
        """Keep caches in the run's folder, where they outlive the process. Raises: ConfigError."""

    def take_costs(self) -> dict[str, float]:
        """Return metrics of the cost of scoring since the previous call; empty without server terms."""
        return {}


class RewardModel(Protocol):
    """A model that scores complete responses."""

    def score(self, groups: Sequence[TrajectoryGroup]) -> list[tuple[Outcome, ...]]:
        """Return, per group, an outcome per response, in order. A response without a finite score is Invalid; no response makes
        it raise."""
        ...
