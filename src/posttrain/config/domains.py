"""Domains: kinds of rows that have a fixed part of every step."""

from __future__ import annotations

from pydantic import Field

from posttrain.config.base import Section
from posttrain.config.group_filter import GroupFilterConfig


class DomainConfig(Section):
    """Rows of certain data sources, and their part of a step."""

    sources: list[str] = Field(min_length=1)
    """Data sources whose rows it draws, each in the same seeded order as alone."""
    prompts_per_step: int = Field(ge=1)
    """Prompts of every step that are from this domain; all domains' together are data.prompts_per_step."""
    group_filter: GroupFilterConfig | None = None
    """Dynamic sampling of this domain; null means the run's group_filter."""
