"""The only thread that uses the model, and the order in which it takes jobs.

The requests of one client carry numbers, and run in their order, however they arrive. Jobs of different clients run in the
order in which they became ready; sampling jobs that can share a batch are taken together. A job that fails fails alone.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from posttrain.data.chat_api import Refused
from posttrain.errors import PosttrainError

_IDLE_S = 1.0  # between two looks at what has expired
GAP_S = 120.0  # that later requests of a client wait for one with a smaller number


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One request. ``run`` gets the inputs of all jobs that are taken together and returns a result for each."""

    run: Callable[[Sequence[Any]], Sequence[Any]]
    given: Any = None
    key: Hashable = None  # jobs with equal keys are run together; None: alone
    owner: str = ""  # the session, whose end drops the job
    refused: Callable[[str], None] = lambda why: None  # called with the reason when it fails
    future: Future[Any] = field(default_factory=Future)


@dataclass(slots=True, eq=False)
class Lane:
    """The order of one client's requests."""

    next: int = 1
    # By number; None: a request that was refused
    waiting: dict[int, Job | None] = field(default_factory=dict)
    since: float = 0.0  # when the first of those that wait arrived


class Failed(Exception):
    """A request failed; the message is for the client."""

    def __init__(self, what: str, category: str):
        super().__init__(what)
        self.category = category  # user or server


class Worker:
    """Runs jobs until it is closed."""

    def __init__(self, tick: Callable[[], None] = lambda: None, *, most_together: int = 64):
        self._tick = tick  # called every second or so, in this thread
        self._most_together = most_together
        self._ready: deque[Job] = deque()
        self._lanes: dict[str, Lane] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="tinker", daemon=True)
        self.failure: BaseException | None = None  # the error that ended the thread

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Drop all jobs, and wait for the one that is running."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self.alive:
            self._thread.join()

    def submit(self, job: Job) -> None:
        """Add a job that waits for no other."""
        with self._changed:
            self._add(job)

    def submit_in_order(self, lane: str, number: int | None, job: Job | None) -> None:
        """Add a job to a client's lane: it runs after those with smaller numbers, or without a number after those before it. None
        stands for a refused request, for which later ones do not wait."""
        with self._changed:
            found = self._lanes.setdefault(lane, Lane())
            if number is None:
                number = max([found.next - 1, *found.waiting]) + 1
            if number < found.next:
                if job is not None:
                    job.future.set_exception(Failed(f"request {number} came after request {found.next - 1}", "user"))
                return
            if not found.waiting:
                found.since = time.monotonic()
            found.waiting[number] = job
            self._advance(found)

    def drop(self, owner: str, lanes: Sequence[str], why: str) -> None:
        """Drop the jobs of a session that have not begun."""
        with self._changed:
            dropped = [job for job in self._ready if job.owner == owner]
            self._ready = deque(job for job in self._ready if job.owner != owner)
            for lane in lanes:
                dropped += [job for job in self._lanes.pop(lane, Lane()).waiting.values() if job is not None]
        for job in dropped:
            job.future.set_exception(Failed(why, "user"))

    def cancel(self, future: Future[Any]) -> None:
        """Drop a job that has not begun."""
        with self._changed:
            job = next((each for each in self._ready if each.future is future), None)
            if job is not None:
                self._ready.remove(job)
                job.future.set_exception(Failed("the request was cancelled", "user"))

    def _add(self, job: Job) -> None:
        if self._closing:
            job.future.set_exception(Failed("the server is closing", "server"))
            return
        self._ready.append(job)
        self._changed.notify()

    def _advance(self, lane: Lane) -> None:
        while lane.next in lane.waiting:
            job = lane.waiting.pop(lane.next)
            lane.next += 1
            lane.since = time.monotonic()
            if job is not None:
                self._add(job)

    def _loop(self) -> None:
        try:
            while not self._closing:
                if jobs := self._take():
                    self._run(jobs)
                self._fail_gaps()
                self._tick()
        except BaseException as error:  # noqa: BLE001 - the server ends, and reports it
            self.failure = error
        finally:
            with self._changed:
                self._closing = True
                left = [*self._ready, *(job for lane in self._lanes.values() for job in lane.waiting.values() if job)]
                self._ready.clear()
                self._lanes.clear()
            for job in left:
                job.future.set_exception(Failed("the server is closing", "server"))

    def _take(self) -> list[Job]:
        with self._changed:
            if not self._ready:
                self._changed.wait(_IDLE_S)
            if not self._ready or self._closing:
                return []
            first = self._ready.popleft()
            if first.key is None:
                return [first]
            alike = [job for job in self._ready if job.key == first.key][: self._most_together - 1]
            taken = set(map(id, alike))
            self._ready = deque(job for job in self._ready if id(job) not in taken)
            return [first, *alike]

    def _run(self, jobs: Sequence[Job]) -> None:
        try:
            results = jobs[0].run([job.given for job in jobs])
        except Exception as error:  # noqa: BLE001 - it is the clients' error, who get it; the others are not affected
            failure = failed(error)
            for job in jobs:
                job.refused(str(failure))
                job.future.set_exception(failure)
            return
        for job, result in zip(jobs, results, strict=True):
            job.future.set_result(result)

    def _fail_gaps(self) -> None:
        """Fail requests that have waited too long for one that never came."""
        late: list[tuple[Job, int]] = []
        with self._changed:
            for lane in self._lanes.values():
                if lane.waiting and time.monotonic() - lane.since > GAP_S:
                    late += [(job, lane.next) for job in lane.waiting.values() if job is not None]
                    lane.next = max(lane.waiting) + 1
                    lane.waiting.clear()
        for job, missing in late:
            why = f"request {missing} of this client, which goes before it, did not come within {GAP_S:g} s"
            job.refused(why)
            job.future.set_exception(Failed(why, "user"))


def failed(error: Exception) -> Failed:
    """Return the error for the client. An unexpected one is also printed with its traceback."""
    if isinstance(error, Failed):
        return error
    if isinstance(error, Refused):
        return Failed(str(error), "user")
    if isinstance(error, PosttrainError):
        return Failed(str(error), "server")
    traceback.print_exception(error, file=sys.stderr)
    return Failed(f"{type(error).__name__}: {error}", "server")


class Skipping:
    """A ``with`` block whose refusals let the requests behind go on."""

    def __init__(self, skip: Callable[[], None]):
        self._skip = skip

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Refused):
            self._skip()
