"""The rows of a batch before they are tensors: one per sample, which is a stretch of a trajectory that grew from one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.records.images import PromptImages
from posttrain.records.trajectories import Outcome, Reward, ScoredGroup, StopReason, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """One sample of a trajectory, with the outcome of the whole trajectory."""

    sample: Trajectory
    prompt: tuple[int, ...]  # token ids
    group: int
    trajectory: int  # counted over all groups
    last: bool  # of its trajectory
    outcome: Outcome
    kept: bool  # False: a filter has taken its group out of the loss
    truncated: bool  # the trajectory was cut at a token limit
    images: PromptImages | None

    @property
    def reward(self) -> float:
        """0 where invalid."""
        return self.outcome.value if isinstance(self.outcome, Reward) else 0.0


def sample_rows(groups: Sequence[ScoredGroup]) -> list[SampleRow]:
    """All samples of all responses of all groups, in order."""
    rows: list[SampleRow] = []
    number = 0
    for index, group in enumerate(groups):
        for trajectory, outcome in zip(group.group.trajectories, group.outcomes, strict=True):
            for sample in trajectory.samples:
                prompt = sample.prompt_token_ids
                prompt = group.group.prompt.token_ids if prompt is None else prompt
                rows.append(
                    SampleRow(
                        sample=sample,
                        # An episode that failed before it began has no token; a model that reads rows needs one, which no
                        # loss sees.
                        prompt=prompt or (0,),
                        group=index,
                        trajectory=number,
                        last=sample is trajectory,
                        outcome=outcome,
                        kept=group.kept,
                        truncated=trajectory.stop_reason is StopReason.LENGTH,
                        images=sample.images or group.group.prompt.images,
                    )
                )
            number += 1
    return rows
