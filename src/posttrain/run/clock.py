"""Times the phases of a step and shows them while they run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from posttrain.records.batches import TrainBatch
from posttrain.records.work import Work
from posttrain.run.profile import Profiler
from posttrain.run.stopping import StopSignal
from posttrain.run.timeline import Timeline
from posttrain.run.trackers import Trackers

UPDATES = ("critic_update", "update")  # from the first of these on, a step cannot be left as if it had not begun


class Clock:
    """One per step. With ``stop``, a step that can still be left is, at a phase's beginning and while work goes on in it:
    ``phase`` and ``advance`` raise StepAbandoned. Phases are put into ``timeline``, and ``profiler`` records those it is to;
    ``before_updates`` is called before weights change."""

    def __init__(
        self,
        trackers: Trackers,
        step: int,
        stop: StopSignal | None = None,
        timeline: Timeline | None = None,
        profiler: Profiler | None = None,
        before_updates: Callable[[Clock], None] | None = None,
    ):
        self._trackers = trackers
        self._step = step
        self._stop = stop
        self._timeline = timeline
        self._profiler = profiler
        self._before_updates = before_updates
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[None]:
        """Time what happens inside; ``total`` is its amount of work, when known."""
        self._leave_if_asked()
        if name in UPDATES and self._before_updates:
            self._before_updates(self)
            self._leave_if_asked()
        if name in UPDATES:
            self._stop = None
        self._trackers.phase(name, self._step, total)
        recorded = self._profiler.phase(self._step, name) if self._profiler else nullcontext()
        start, began = time.perf_counter(), time.time()
        try:
            with recorded:
                yield
        finally:
            seconds = time.perf_counter() - start
            self._seconds[name] += seconds
            if self._timeline:
                self._timeline.add(self._step, name, began, began + seconds)

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

    def throughput(
        self, sampled_tokens: int, batch: TrainBatch, work: Work | None = None, epochs: int = 1
    ) -> dict[str, float]:
        """Response tokens sampled per second, tokens (prompts included) per second of the other phases that the step had, and
        what share of the device's arithmetic the policy's update used, where ``work`` is known; ``epochs`` are its passes."""
        speeds = {"speed/rollout_tokens_per_s": sampled_tokens / self._seconds["rollout"]}
        tokens = int(batch.sequences.prompt_lengths.sum() + batch.sequences.response_lengths.sum())
        scored = batch.logprobs.old is not None or batch.logprobs.ref is not None
        for phase in ("logprobs", "values", "critic_update", "update"):
            if phase in self._seconds and (phase != "logprobs" or scored):  # on-policy, nothing may need log-probs
                speeds[f"speed/{phase}_tokens_per_s"] = tokens / self._seconds[phase]
        if work and "update" in self._seconds:
            flops_per_s = epochs * work.update_flops(batch.sequences) / self._seconds["update"]
            speeds["speed/update_peak_share"] = flops_per_s / work.flops_per_s
        return speeds
