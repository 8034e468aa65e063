"""A second draw of a step's responses, by their scores, before the updates."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from posttrain.config.base import Section


class ResamplingConfig(Section):
    """Drawn after advantages are estimated: as many responses as the step has, with replacement (PF-PPO, arXiv:2409.06957)."""

    weights: Literal["none", "power", "extremes", "best"] = "none"
    """Probability of a response, up to a factor. power: |score|^exponent; extremes: 1 with the highest or the lowest score of
    the step, else 0; best: 0.4 with the highest, else 0.1. none: each response is learned from once."""
    exponent: float = Field(default=2.0, ge=0.0)
    """Exponent of power; 0 gives all responses the same probability."""
