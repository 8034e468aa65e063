"""Times the phases of a step and shows them while they run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from posttrain.loops.stopping import StopSignal
from posttrain.loops.trackers import Trackers
from posttrain.records.batches import TrainBatch

UPDATES = ("critic_update", "update")  # from the first of these on, a step cannot be left as if it had not begun


class Clock:
    """One per step. With ``stop``, a step that can still be left is, at a phase's beginning and while work goes on in it:
    ``phase`` and ``advance`` raise StepAbandoned."""

    def __init__(self, trackers: Trackers, step: int, stop: StopSignal | None = None):
        self._trackers = trackers
        self._step = step
        self._stop = stop
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[None]:
        """Time what happens inside; ``total`` is its amount of work, when known."""
        self._leave_if_asked()
        if name in UPDATES:
            self._stop = None
        self._trackers.phase(name, self._step, total)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def advance(self, units: int) -> None:
        self._leave_if_asked()
        self._trackers.advance(units)

    def _leave_if_asked(self) -> None:
        if self._stop:
            self._stop.check()

    def metrics(self) -> dict[str, float]:
        """Seconds of each phase so far, and of the step."""
        times = {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
        return times | {"time/step_s": time.perf_counter() - self._start}

    def throughput(self, sampled_tokens: int, batch: TrainBatch) -> dict[str, float]:
        """Response tokens sampled per second, and tokens (prompts included) that the policy was trained on per second, when
        it was."""
        speeds = {"speed/rollout_tokens_per_s": sampled_tokens / self._seconds["rollout"]}
        if "update" in self._seconds:
            trained = int(batch.sequences.prompt_lengths.sum() + batch.sequences.response_lengths.sum())
            speeds["speed/update_tokens_per_s"] = trained / self._seconds["update"]
        return speeds
