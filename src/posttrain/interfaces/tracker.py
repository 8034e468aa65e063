"""Interfaces of trackers: progress shown while a run works, and metrics uploaded to a service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from posttrain.config import TrainingConfig
from posttrain.records.tracked_run import TrackedRun


class Tracker(Protocol):
    """Receives the events of a run, in order. A tracker that fails is switched off by the caller; it never stops a run."""

    def begin(self, config: TrainingConfig, total_steps: int, first_step: int) -> None: ...

    def phase(self, name: str, step: int, total: int | None = None) -> None:
        """Begin a phase of a step (rollout, reward, baseline, logprobs, values, critic_update, update, weight_sync, validation,
        checkpoint), with ``total`` units of work, when known."""
        ...

    def advance(self, units: int) -> None:
        """Report finished units of the phase's work (tokens of a rollout, sequences of an update)."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def message(self, text: str) -> None:
        """Show a line to the user."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Uploader(Protocol):
    """A tracker that receives finished steps only, in order. It may fail and may be slow: it runs in a thread of its own
    (run.relay), which reads from RUN_DIR, so that no step is lost and none waits."""

    rewinds: bool  # True: steps may be sent again and replace those sent before

    def open(self, run: TrackedRun, last_step: int) -> int:
        """Begin, or continue the run with this id. ``last_step`` was the last one sent, -1 for none.

        Returns: the last step that the service holds; ``last_step`` when it cannot tell.
        """
        ...

    def send(self, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]]) -> None:
        """Send one step: its finite metrics, and responses of its validation (rows of validation/step_N.jsonl), if any."""
        ...

    def close(self, status: str) -> None:
        """End the run with a status: done, interrupted, stopped or failed."""
        ...
