"""A second draw of a step's responses before the updates: by their scores, or until they divide into updates."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from posttrain.config.base import Section
from posttrain.config.fitting import Fit


class ResamplingConfig(Section):
    """Drawn after advantages are estimated, which compare each response once. ``weights`` draw as many responses as the step has,
    with replacement (PF-PPO, arXiv:2409.06957); ``fit`` then changes the number of training samples."""

    weights: Literal["none", "power", "extremes", "best"] = "none"
    """Probability of a response, up to a factor. power: |score|^exponent; extremes: 1 with the highest or the lowest score of
    the step, else 0; best: 0.4 with the highest, else 0.1. none: each response is learned from once."""
    exponent: float = Field(default=2.0, ge=0.0)
    """Exponent of power; 0 gives all responses the same probability."""
    fit: Fit = "none"
    """Make the number of a step's training samples (turns with environment.sample_per_turn) divide by multiple_of, with samples
    drawn at random. copy: copies up to the next multiple; drop: leaves out those beyond the last one; nearest: copies where the
    rest is at least half of all, else leaves out; one: takes multiple_of of them. Fewer than multiple_of are copied up to it."""
    multiple_of: int | None = Field(default=None, ge=1)
    """Divisor of fit; null means the sequences of an update of the policy, and of the critic."""

    @property
    def redraws(self) -> bool:
        """Return True where the updates may see other rows than those that were sampled."""
        return self.weights != "none" or self.fit != "none"
