"""Turns whose tokens a host of environments takes while they are sampled."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from posttrain.interfaces.env import EnvHost, TokenHost
from posttrain.interfaces.rollout_engine import RequestStream, ResumableStream

_ALL_SEEN = 1 << 62  # tokens, of other requests


@dataclass(slots=True)
class Watched:
    """The turns by the names of their requests, and how many tokens of each the host has."""

    host: EnvHost
    _turns: dict[str, tuple[str, str]] = field(default_factory=dict)
    _seen: dict[str, int] = field(default_factory=dict)

    def add(self, request: str, episode: str, turn: str) -> None:
        """Watch a request, if the host wants to have its tokens."""
        if isinstance(self.host, TokenHost) and self.host.streams(episode, turn):
            self._turns[request], self._seen[request] = (episode, turn), 0

    def report(self, stream: RequestStream, sampling: Collection[str]) -> None:
        """Give the host the tokens that have come since the last call. ``sampling``: the names of all requests in progress.

        A stream that cannot report them gives the whole turns only.
        """
        for name in [each for each in self._turns if each not in sampling]:
            del self._turns[name], self._seen[name]
        if not self._turns or not isinstance(stream, ResumableStream):
            return
        assert isinstance(self.host, TokenHost)
        for grown in stream.progress({name: self._seen.get(name, _ALL_SEEN) for name in sampling}):
            self._seen[grown.sample_id] += len(grown.token_ids)
            self.host.grown(*self._turns[grown.sample_id], grown)
