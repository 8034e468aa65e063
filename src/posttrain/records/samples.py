"""The rows of a batch before they are tensors: one per sample, which is a stretch of a trajectory that grew from one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from posttrain.records.from_columns import records_of
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
    columns: dict[str, list[Any]] = {field.name: [] for field in fields(SampleRow)}
    number = 0
    for index, group in enumerate(groups):
        given = group.group.prompt
        for trajectory, outcome in zip(group.group.trajectories, group.outcomes, strict=True):
            samples = trajectory.samples if trajectory.earlier else (trajectory,)
            count = len(samples)
            columns["sample"] += samples
            # An episode that failed before it began has no token; a model that reads rows needs one, which no loss sees.
            columns["prompt"] += [
                (given.token_ids if each.prompt_token_ids is None else each.prompt_token_ids) or (0,)
                for each in samples
            ]
            columns["trajectory"] += [number] * count
            columns["last"] += [False] * (count - 1) + [True]
            columns["outcome"] += [outcome] * count
            columns["truncated"] += [trajectory.stop_reason is StopReason.LENGTH] * count
            columns["images"] += [each.images or given.images for each in samples]
            number += 1
        rows = len(columns["sample"]) - len(columns["group"])
        columns["group"] += [index] * rows
        columns["kept"] += [group.kept] * rows
    return records_of(SampleRow, columns, len(columns["sample"]))
