"""The clock of a step: it times its phases and shows them while they are under way."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

from posttrain.records.batches import TrainBatch
from posttrain.records.work import Work
from posttrain.run.profile import Profiler
from posttrain.run.stopping import StepAbandoned, StopSignal
from posttrain.run.timeline import Timeline
from posttrain.run.trackers import Trackers

MAIN = "main"  # the lane of the loop itself
UPDATES = ("critic_update", "update")  # from the first of these on, a step cannot be left as if it had not begun


class Interval(NamedTuple):
    """A phase of the step, in seconds of a clock that only runs forward."""

    phase: str
    lane: str  # who works: phases of one lane never overlap
    start: float
    end: float
    seconds: float


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
        self._stop = self._signal = stop
        self._timeline = timeline
        self._profiler = profiler
        self._before_updates = before_updates
        self._start = time.perf_counter()
        self._intervals: list[Interval] = []

    @contextmanager
    def phase(self, name: str, total: int | None = None, *, lane: str = MAIN) -> Iterator[None]:
        """Time everything inside; ``total`` is its amount of work, when known. Phases may overlap in different lanes, each of
        which is one thread's."""
        self.leave_if_asked()
        if name in UPDATES and self._before_updates:
            self._before_updates(self)
            self.leave_if_asked()
        if name in UPDATES:
            self._stop = None
        if lane == MAIN:
            self._trackers.phase(name, self._step, total)
        profiled = self._profiler if lane == MAIN else None
        recorded = profiled.phase(self._step, name) if profiled else nullcontext()
        start, began = time.perf_counter(), time.time()
        try:
            with recorded:
                yield
        finally:
            seconds = time.perf_counter() - start
            self._intervals.append(Interval(name, lane, start, start + seconds, seconds))
            if self._timeline:
                self._timeline.add(self._step, name, began, began + seconds, lane=None if lane == MAIN else lane)

    def in_lane(self, lane: str) -> LaneClock:
        """The same clock for another thread."""
        return LaneClock(self, lane)

    @property
    def stopping(self) -> bool:
        """True once a stop was requested, also where the step can no longer be left."""
        return self._signal is not None and self._signal.requested

    def advance(self, units: int) -> None:
        self.leave_if_asked()
        self._trackers.advance(units)

    def leave_if_asked(self) -> None:
        """Raises: StepAbandoned, where the step can still be left and a stop was requested."""
        if self._stop:
            self._stop.check()

    def metrics(self) -> dict[str, float]:
        """Seconds of each phase so far, and of the step."""
        times = {f"time/{name}_s": seconds for name, seconds in self.seconds().items()}
        return times | {"time/step_s": self.elapsed_s()}

    def seconds(self, lane: str | None = None) -> dict[str, float]:
        """Seconds of each phase: the sum over its intervals, of one lane or of all."""
        found: dict[str, float] = defaultdict(float)
        for interval in list(self._intervals):
            if lane in (None, interval.lane):
                found[interval.phase] += interval.seconds
        return dict(found)

    def elapsed_s(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._start

    def busy_s(self) -> float:
        """Seconds in which at least one phase was under way: overlapping ones count once."""
        busy, until = 0.0, -math.inf
        for interval in sorted(self._intervals, key=lambda each: each.start):
            busy += max(0.0, interval.end - max(interval.start, until))
            until = max(until, interval.end)
        return busy

    def throughput(
        self, sampled_tokens: int, batch: TrainBatch, work: Work | None = None, epochs: int = 1
    ) -> dict[str, float]:
        """Response tokens sampled per second, tokens (prompts included) per second of the other phases that the step had, and
        what share of the device's arithmetic the policy's update used, where ``work`` is known; ``epochs`` are its passes."""
        seconds = self.seconds()
        speeds = {}
        if "rollout" in seconds:  # where sampling is ahead, a step may have none
            speeds["speed/rollout_tokens_per_s"] = sampled_tokens / seconds["rollout"]
        tokens = int(batch.sequences.prompt_lengths.sum() + batch.sequences.response_lengths.sum())
        scored = batch.logprobs.old is not None or batch.logprobs.ref is not None
        for phase in ("logprobs", "values", "critic_update", "update"):
            # On-policy, nothing may need log-probs
            if phase in seconds and (phase != "logprobs" or scored):
                speeds[f"speed/{phase}_tokens_per_s"] = tokens / seconds[phase]
        if work and "update" in seconds:
            flops_per_s = epochs * work.update_flops(batch.sequences) / seconds["update"]
            speeds["speed/update_peak_share"] = flops_per_s / work.flops_per_s
        return speeds


class LaneClock:
    """A step's clock in another thread, which works for a later step. It times phases in a lane of its own; progress is shown of
    the loop's own phases. ``phase`` and ``advance`` raise StepAbandoned as soon as a stop was requested."""

    def __init__(self, clock: Clock, lane: str):
        self._clock = clock
        self._lane = lane

    def phase(self, name: str, total: int | None = None) -> AbstractContextManager[None]:
        self._leave_if_asked()
        return self._clock.phase(name, total, lane=self._lane)

    def in_lane(self, lane: str) -> LaneClock:
        return LaneClock(self._clock, lane)

    @property
    def stopping(self) -> bool:
        return self._clock.stopping

    def advance(self, units: int) -> None:
        self._leave_if_asked()

    def _leave_if_asked(self) -> None:
        if self.stopping:
            raise StepAbandoned
