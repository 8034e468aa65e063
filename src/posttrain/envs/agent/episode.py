"""The description of an episode that an agent receives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from posttrain.interfaces.env import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEpisode:
    """A row to play, and the endpoint that serves the policy's turns."""

    base_url: str  # of an OpenAI-compatible API, for this episode only
    api_key: str
    messages: Sequence[Message]  # the row's conversation
    row: Mapping[str, Any]  # its other columns
    seed: int  # the same for all samples of a group
    max_turns: int | None  # further requests are rejected

    def plain(self) -> dict[str, Any]:
        """Return plain values, without address and token."""
        return {name: value for name, value in asdict(self).items() if name not in ("base_url", "api_key")}
