"""Score responses."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.errors import RunStopped
from posttrain.interfaces.reward import GroupScorer
from posttrain.records.trajectories import Invalid, ScoredGroup, TrajectoryGroup


class TooManyInvalid(RunStopped):
    """More responses without a valid reward than the run allows. ``scored`` holds them all."""

    def __init__(self, message: str, scored: list[ScoredGroup]):
        super().__init__(message)
        self.scored = scored


def score(groups: Sequence[TrajectoryGroup], scorer: GroupScorer, max_invalid_share: float = 1.0) -> list[ScoredGroup]:
    """An outcome for every response.

    Raises: TooManyInvalid when more than ``max_invalid_share`` of the responses could not be scored, with examples: a broken
        reward function must not pass for a policy that learns nothing.
    """
    scored = [ScoredGroup(group=group, outcomes=scorer.score(group)) for group in groups]
    failures = [
        (trajectory.sample_id, outcome)
        for group in scored
        for trajectory, outcome in zip(group.group.trajectories, group.outcomes, strict=True)
        if isinstance(outcome, Invalid)
    ]
    responses = sum(len(group.outcomes) for group in scored)
    if failures and len(failures) > max_invalid_share * responses:
        examples = "\n".join(
            f"  {sample_id}: {failure.reason}: {failure.detail}" for sample_id, failure in failures[:10]
        )
        raise TooManyInvalid(
            f"{len(failures)} of {responses} responses have no valid reward, more than reward.max_invalid_share "
            f"= {max_invalid_share:g} allows:\n{examples}",
            scored,
        )
    return scored
