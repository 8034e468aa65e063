"""Rewards brought to a common scale before the advantages: by the group, the step or the run so far."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.algos.groups import centered, groups_of

EPSILON = 1e-6  # added to every standard deviation; one that is not above it counts as no spread at all


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningMoments:
    """Mean and spread of all rewards of a run so far. Plain float64 numbers, so that saved ones go on exactly."""

    count: int = 0
    mean: float = 0.0  # reward units
    squares: float = 0.0  # sum of squared deviations from the mean

    @property
    def std(self) -> float:
        """The sample standard deviation (n - 1); 0 for fewer than two rewards."""
        return (self.squares / (self.count - 1)) ** 0.5 if self.count > 1 else 0.0

    def with_rewards(self, rewards: Tensor) -> RunningMoments:
        """The moments with these rewards [n] added; equal rewards keep a spread of exactly 0.

        Source: T. Chan, G. Golub, R. LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances",
        1979.
        """
        if not len(rewards):
            return self
        values = rewards.double()
        added, count = len(values), self.count + len(values)
        mean = float(values[0] if (values == values[0]).all() else values.mean())
        difference = mean - self.mean
        return RunningMoments(
            count=count,
            mean=self.mean + difference * (added / count),  # the first time a factor of exactly 1
            squares=self.squares + float(centered(values).square().sum()) + difference**2 * self.count * added / count,
        )


def normalize_rewards(
    rewards: Tensor,
    valid: Tensor,
    group_index: Tensor,
    moments: RunningMoments,
    *,
    mean: str,
    std: str,
    part_index: Tensor | None = None,
) -> Tensor:
    """(r - mean) / (std + 1e-6), each taken over the group, the batch (a step) or the run, or not taken (none).

    Standard deviations are sample ones (n - 1). Where the one asked for is not above 1e-6 (equal rewards, a single valid
    reward) there is no scale to measure by and the result is exactly 0; so is r - mean among equal rewards, although the
    rounded mean of equal floats need not be that float.

    Args: rewards [B]; valid [B] bool, the others are in no statistic; group_index [B] int64; moments of the run, this batch
        included; mean and std, each none, group, batch or running; part_index [B] int64, equal for responses that make up a
        batch, None: all of them.
    Returns: [B] in the dtype of rewards; 0 where not valid, even if the rewards there are not finite.
    Source: ROLL's reward normalisation. There a group's std with another mean, groups of one and the running form fail.
    """
    values = torch.where(valid, rewards, 0.0).double()
    parts = {
        "group": list(groups_of(group_index, valid)),
        "batch": list(groups_of(torch.zeros_like(group_index) if part_index is None else part_index, valid)),
    }
    distances = values - moments.mean if mean == "running" else values.clone()
    for rows in parts.get(mean, ()):
        distances[rows] = centered(values[rows])
    if std != "none":
        scales = torch.full_like(values, moments.std)
        for rows in parts.get(std, ()):
            scales[rows] = centered(values[rows]).square().sum().div(max(len(rows) - 1, 1)).sqrt()
        distances = torch.where(scales > EPSILON, distances / (scales + EPSILON), 0.0)
    return torch.where(valid, distances, 0.0).to(rewards.dtype)
