"""Where a run shows itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from posttrain.config import RunConfig


class Tracker(Protocol):
    """Told what happens, in order. A tracker that fails is switched off by the caller; it never stops a run."""

    def begin(self, config: RunConfig, total_steps: int, first_step: int) -> None: ...

    def phase(self, name: str, step: int, total: int | None = None) -> None:
        """A phase of a step begins (rollout, reward, baseline, logprobs, values, critic_update, update, weight_sync, validation,
        checkpoint), with ``total`` units of work, when known."""
        ...

    def advance(self, units: int) -> None:
        """So many units of the phase's work are done (tokens of a rollout, sequences of an update)."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def message(self, text: str) -> None:
        """A line for a person."""
        ...

    def close(self) -> None: ...
