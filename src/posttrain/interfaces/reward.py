"""A reward: from a response to a number, or to a typed failure."""

from __future__ import annotations

from typing import Protocol

from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Outcome, TrajectoryGroup


class RewardFn(Protocol):
    """One term of the reward."""

    def __call__(self, prompt: Prompt, response: str) -> float:
        """Score of one response. May raise: the caller turns that into an Invalid outcome."""
        ...


class GroupScorer(Protocol):
    """All terms together, over a group."""

    def score(self, group: TrajectoryGroup) -> tuple[Outcome, ...]:
        """An outcome per response, in order. Never raises for what a response or a grader does."""
        ...
