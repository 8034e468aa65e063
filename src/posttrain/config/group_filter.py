"""Dynamic sampling: what happens to groups of responses that teach nothing."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from posttrain.config.base import Section


class GroupFilterConfig(Section):
    """Looks at a group's rewards before any normalisation; responses without a valid reward do not count."""

    strategy: Literal["none", "refill", "replace", "drop", "mask"] = "none"
    """Handling of rejected groups. none keeps every group; refill samples further prompts until the step is full; replace
    repeats kept groups in their place; drop trains on fewer groups; mask takes rejected ones out of the loss only."""
    metric: str = "reward"
    """The score that is tested: reward, or the name of a reward term."""
    above_std: float | None = Field(default=0.0, ge=0.0)
    """Keep groups whose standard deviation is above this; null does not ask."""
    above_mean: float | None = None
    """Keep groups whose mean is above this; null does not ask."""
    below_mean: float | None = None
    """Keep groups whose mean is below this; null does not ask."""
    max_batches: int | None = Field(default=None, ge=1)
    """refill, replace: batches of prompts sampled for one step before the run stops itself; null goes on."""
    min_kept_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """replace: sample the step again while a smaller share of its groups is kept."""
