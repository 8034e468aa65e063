"""Where a run shows itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from posttrain.config import TrainingConfig
from posttrain.records.tracked_run import TrackedRun


class Tracker(Protocol):
    """Told what happens, in order. A tracker that fails is switched off by the caller; it never stops a run."""

    def begin(self, config: TrainingConfig, total_steps: int, first_step: int) -> None: ...

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


@runtime_checkable
class Uploader(Protocol):
    """A tracker that is only sent finished steps, in order. It may fail and may be slow: it works in a thread of its own
    (loops.relay), which reads what it sends from RUN_DIR, so that nothing is lost and no step waits."""

    rewinds: bool  # whether steps may be sent again, and take the place of what was sent

    def open(self, run: TrackedRun, last_step: int) -> int:
        """Begin, or go on with the run of this id. ``last_step`` was the last that was sent, -1 for none.

        Returns: the last step that it holds: ``last_step`` where it cannot tell.
        """
        ...

    def send(self, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]]) -> None:
        """One step: its finite metrics, and responses of its validation (rows of validation/step_N.jsonl), if any."""
        ...

    def close(self, status: str) -> None:
        """The run has ended: done, interrupted, stopped or failed."""
        ...
