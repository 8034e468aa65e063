"""Streams whose requests are recorded with the passes of the sampler at which they came, and come again at the same passes.

What a sampler computes, to the last bit, depends on the passes between which requests come and go: others share a batch, or a
worker. So a run whose requests come at the recorded passes has the same numbers, however fast its environments answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

from posttrain.asynchrony.passes import PostScript
from posttrain.errors import RunStopped
from posttrain.interfaces.rollout_engine import Request, ResumableStream
from posttrain.records.trajectories import Trajectory, Unfinished

PAUSE_S = 0.005  # while an environment has not answered yet

Note = Callable[[str, Mapping[str, Any]], None]  # an event, and its values


class NotedStream:
    """A stream that records each order: the requests that came or were cancelled after so many passes, and its rest."""

    def __init__(self, stream: ResumableStream, note: Note):
        self._stream, self._note = stream, note

    @property
    def slots(self) -> int:
        return self._stream.slots

    @property
    def passes(self) -> int:
        return self._stream.passes

    def submit(self, requests: Sequence[Request]) -> None:
        if requests:
            self._order(requests, ())

    def wait(self, timeout_s: float, passes: int | None = None) -> list[Trajectory]:
        return self._stream.wait(timeout_s, passes)

    def cancel(self, sample_ids: Collection[str]) -> None:
        if sample_ids:
            self._order((), sample_ids)

    def progress(self, since: Mapping[str, int]) -> list[Unfinished]:
        return self._stream.progress(since)

    def take_back(self, *, keep_cache: bool = False) -> list[Unfinished]:
        self._note("rest", {"pass": self.passes})
        return self._stream.take_back(keep_cache=keep_cache)

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _order(self, new: Sequence[Request], cancelled: Collection[str]) -> None:
        self._stream.submit(new)
        self._stream.cancel(cancelled)
        sent = [request.sample_id for request in new]
        self._note("order", {"pass": self.passes, "sent": sent, "cancelled": sorted(cancelled)})


class FollowingStream(NotedStream):
    """A stream that holds requests and cancellations back until their recorded pass, and does not sample beyond the rest.

    Args: script has the orders of this stretch of sampling; the last one is its rest.
    """

    def __init__(self, stream: ResumableStream, note: Note, script: PostScript):
        super().__init__(stream, note)
        self._script = script
        self._held: dict[str, Request] = {}
        self._withdrawn: set[str] = set()

    @property
    def rests(self) -> bool:
        """True when the recorded run let its sampler rest after the present pass."""
        self._follow()
        due = self._script.due(self.passes)
        return due is not None and due.kind == "rest"

    def submit(self, requests: Sequence[Request]) -> None:
        self._held |= {request.sample_id: request for request in requests}

    def cancel(self, sample_ids: Collection[str]) -> None:
        for name in sample_ids:
            if self._held.pop(name, None) is None:
                self._withdrawn.add(name)

    def wait(self, timeout_s: float, passes: int | None = None) -> list[Trajectory]:
        """Sample up to the next recorded order; return at once, after a short pause, when it is due and waits for an environment.

        Raises: RunStopped when nothing is being sampled and the next order comes later.
        """
        self._follow()
        until, before = self._script.until, self.passes
        if until is None or until <= before:
            time.sleep(min(timeout_s, PAUSE_S))
            return []
        ended = super().wait(timeout_s, until - before if passes is None else min(passes, until - before))
        if not ended and self.passes == before:
            raise RunStopped(f"nothing is sampled after pass {before}, and its next requests come after pass {until}")
        return ended

    def _follow(self) -> None:
        """Give the orders that are due, as far as all that they name is here."""
        while (due := self._script.due(self.passes)) is not None and due.kind == "order":
            if not (self._held.keys() >= set(due.sent) and self._withdrawn >= set(due.cancelled)):
                return
            self._withdrawn -= set(due.cancelled)
            self._order([self._held.pop(name) for name in due.sent], due.cancelled)
            self._script.follow("order")
