"""A reward: from a response to a number, or to a typed failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Outcome, TrajectoryGroup


class RewardFn(Protocol):
    """One term of the reward."""

    def __call__(self, prompt: Prompt, response: str) -> float | Mapping[str, object]:
        """Score of one response, or a mapping with it under "score" and other values beside it. May raise: the caller turns
        that into an Invalid outcome."""
        ...


class GroupScorer(Protocol):
    """All terms together, over a group."""

    def score(self, group: TrajectoryGroup) -> tuple[Outcome, ...]:
        """An outcome per response, in order. Never raises for what a response or a grader does."""
        ...


class RewardModel(Protocol):
    """A model that scores whole responses."""

    def score(self, groups: Sequence[TrajectoryGroup]) -> list[tuple[Outcome, ...]]:
        """Per group, an outcome per response, in order. A response without a finite score is Invalid; never raises for what a
        response does."""
        ...
