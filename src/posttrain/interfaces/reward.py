"""A reward: from a response to a number, or to a typed failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from posttrain.errors import PosttrainError
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Outcome, TrajectoryGroup


class NotScored(PosttrainError):
    """A reward could not be found for a reason that has a word of its own, that of Invalid.reason."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason


class RewardFn(Protocol):
    """One term of the reward."""

    def __call__(self, prompt: Prompt, response: str) -> float | Mapping[str, object]:
        """Score of one response, or a mapping with it under "score" and other values beside it. May raise: the caller turns
        that into an Invalid outcome."""
        ...


class BatchedRewardFn(Protocol):
    """One term of the reward, asked about many responses at once."""

    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Sequence[float | Mapping[str, object]]:
        """What RewardFn gives, for every response. May raise."""
        ...


class GroupScorer(Protocol):
    """All terms together, over groups."""

    def begin(self, group: TrajectoryGroup) -> None:
        """A group that will be scored is there: what can be done in the background begins."""

    def score(self, groups: Sequence[TrajectoryGroup]) -> list[tuple[Outcome, ...]]:
        """Per group, an outcome per response, in order. The same whether and when ``begin`` was called. Never raises for
        what a response or a grader does."""
        ...

    def keep_in(self, folder: Path) -> None:
        """The run's folder, for what is to outlive the process. Raises: ConfigError."""

    def take_costs(self) -> dict[str, float]:
        """Metrics of what scoring has cost since this was called before; empty when no server was asked."""
        return {}


class RewardModel(Protocol):
    """A model that scores whole responses."""

    def score(self, groups: Sequence[TrajectoryGroup]) -> list[tuple[Outcome, ...]]:
        """Per group, an outcome per response, in order. A response without a finite score is Invalid; never raises for what a
        response does."""
        ...
