"""How responses are scored."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from posttrain.config.base import Section


class RewardTerm(Section):
    name: str
    """A built-in reward (exact_match, reasoning_gym), or, with path, the name of your function in that file."""
    path: str | None = None
    """Python file that holds the function called name; null means a built-in reward."""
    weight: float = 1.0
    """Factor of this term in the sum that is the reward."""
    options: dict[str, Any] = {}
    """Keyword arguments for the reward."""


class RewardConfig(Section):
    terms: list[RewardTerm] = Field(default=[RewardTerm(name="exact_match")], min_length=1)
    """Reward terms; a response's reward is their weighted sum."""
    max_invalid_share: float = Field(default=0.5, ge=0.0, le=1.0)
    """Share of responses in one step that may be without a valid reward before the run stops."""
