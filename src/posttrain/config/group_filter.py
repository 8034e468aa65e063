"""Dynamic sampling: what happens to groups of responses that teach nothing."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from posttrain.config.base import Section


class GroupFilterConfig(Section):
    """Looks at a group's rewards before any normalisation; responses without a valid reward do not count."""

    strategy: Literal["none", "refill", "replace", "drop", "mask", "prefer"] = "none"
    """Handling of rejected groups. none keeps every group; refill samples further prompts until the step is full; replace
    repeats kept groups in their place; drop trains on fewer groups; mask takes rejected ones out of the loss only; prefer samples
    oversample times the prompts of a step and fills it with the groups that pass, then with the others (PRIME)."""
    metric: str = "reward"
    """The score that is tested: reward, or the name of a reward term."""
    above_std: float | None = Field(default=0.0, ge=0.0)
    """Keep groups whose standard deviation is above this; null does not ask."""
    above_mean: float | None = None
    """Keep groups whose mean is above this; null does not ask."""
    below_mean: float | None = None
    """Keep groups whose mean is below this; null does not ask."""
    below_tokens: int | None = Field(default=None, ge=1)
    """Keep groups whose longest response has fewer sampled tokens than this; null does not ask."""
    oversample: int = Field(default=1, ge=1)
    """prefer: batches of prompts that are sampled for every step; the groups without a place in it are dropped."""
    max_batches: int | None = Field(default=None, ge=1)
    """refill, replace: batches of prompts sampled for one step before the run stops itself; null goes on."""
    min_kept_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """replace: sample the step again while a smaller share of its groups is kept."""
