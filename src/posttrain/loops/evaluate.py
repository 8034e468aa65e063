"""Scores of responses that are in a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from posttrain.errors import RunInterrupted
from posttrain.interfaces.reward import GroupScorer
from posttrain.records.trajectories import ScoredGroup, TrajectoryGroup
from posttrain.run.stopping import StopSignal
from posttrain.steps.score import score

OnScored = Callable[[int], None]  # prompts that were scored since the last call


def run(
    groups: Sequence[TrajectoryGroup],
    scorer: GroupScorer,
    *,
    groups_at_once: int,
    stop: StopSignal,
    on_scored: OnScored,
) -> list[ScoredGroup]:
    """Score all groups, in order; ``groups_at_once`` of them are handed to the scorer together.

    Raises: RunInterrupted when a signal asks to stop, between two such lots.
    """
    scored: list[ScoredGroup] = []
    for start in range(0, len(groups), groups_at_once):
        if stop.requested:
            raise RunInterrupted(
                f"stopped by {stop.name} after {len(scored)} of {len(groups)} prompts; nothing was written, start it again"
            )
        some = groups[start : start + groups_at_once]
        for group in some:
            scorer.begin(group)
        scored += score(some, scorer)
        on_scored(len(some))
    return scored
