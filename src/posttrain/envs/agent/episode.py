"""What an agent is told about its session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from posttrain.interfaces.env import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEpisode:
    """A row to be played, and where turns of the policy are to be had."""

    base_url: str  # of an OpenAI-compatible API, for this session alone
    api_key: str
    messages: Sequence[Message]  # the row's conversation
    row: Mapping[str, Any]  # its other columns
    seed: int  # the same for all samples of a group
    max_turns: int | None  # further requests are refused

    def plain(self) -> dict[str, Any]:
        """Without address and token."""
        return {name: value for name, value in asdict(self).items() if name not in ("base_url", "api_key")}
