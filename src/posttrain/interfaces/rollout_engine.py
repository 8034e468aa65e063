"""A sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, TrajectoryGroup

OnTokens = Callable[[int], None]  # called now and then with the number of tokens sampled since the last call
OnGroup = Callable[[TrajectoryGroup], None]  # called with each group when all its responses have ended


class RolloutEngine(Protocol):
    @property
    def version(self) -> int:
        """Version of the weights it samples from: the number of updates they have seen."""
        ...

    def weights_changed(self, version: int) -> None:
        """The weights it reads now are this version; whatever it kept of older ones is void."""
        ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        on_tokens: OnTokens | None = None,
        on_group: OnGroup | None = None,
    ) -> list[TrajectoryGroup]:
        """One group per prompt, in the order given. ``on_group`` gets the same groups, in the order in which they are done,
        while others are still being sampled where the engine can."""
        ...
