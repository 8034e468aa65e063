"""Shares of the data sources that follow their success."""

from __future__ import annotations

from pydantic import Field

from posttrain.config.base import Section


class CurriculumConfig(Section):
    """Every data source (of generated episodes: every environment in named) has a share of each step, which follows its
    success rate."""

    target: float = Field(default=0.5, gt=0.0, lt=1.0)
    """Success rate at which a source gets most: its weight falls evenly from 1 there to 0 at the rates 0 and 1."""
    least_share: float = Field(default=0.05, ge=0.0, le=1.0)
    """Share of the prompts that every source has at least."""
    most_share: float = Field(default=1.0, gt=0.0, le=1.0)
    """Share that a source has at most."""
    memory: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Weight of the success rate before a step in the one after it; the step's own rate has the rest. 0 looks at the last step
    alone."""
    success_score: float = 1.0
    """Least reward of a success, where the environment does not report the metric success itself."""
