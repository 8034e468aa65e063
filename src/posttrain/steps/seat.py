"""A sampler that works in turns: between two of them it gets requests and new weights, and continues what it had begun."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import cast

from posttrain.interfaces.crew import Order, Turned
from posttrain.interfaces.rollout_engine import Request, RequestStream, ResumableStream, TurnSampler, as_read
from posttrain.records.trajectories import Trajectory, Unfinished

MOST_REPORTS = 32  # in a row, of a response's new tokens alone
LOOK_S = 0.1  # in a turn, between two looks for a call of ``hurry``


class StreamSeat:
    """See interfaces.crew.Seat. Its stream is opened by a turn and closed by a rest, so that the engine is free in between.

    Args: ``resumes``: the engine's streams hand responses back and continue them (ResumableStream); keeps_cache, with their keys
        and values, although newer weights continue them.
    """

    def __init__(self, engine: TurnSampler, *, resumes: bool, keeps_cache: bool = False):
        self._engine, self._resumes, self._keeps_cache = engine, resumes, keeps_cache
        self._stream: RequestStream | None = None
        self._requests: dict[str, Request] = {}  # not ended, in the order of submission
        self._reported: dict[str, int] = {}  # tokens of each that were reported
        self._reports = Counter[str]()  # of these, since all were
        self._earlier = 0  # passes of closed streams
        self._tokens = 0  # of this turn
        self._hurried = False

    def turn(self, order: Order) -> Turned:
        """Take new and cancelled requests, then sample until the time or the passes are over, or nothing is left to do."""
        began = time.monotonic()
        stream = self._opened(order)
        self._tokens, begun = 0, self._passes
        if order.cancelled:
            stream.cancel(order.cancelled)
            for name in order.cancelled:
                self._forget(name)
        new = [as_read(request) for request in order.new]
        stream.submit(new)
        for request in new:
            self._requests[request.sample_id] = request
            self._reported[request.sample_id] = len(request.begun.token_ids) if request.begun else 0
        ended: list[Trajectory] = []
        while self._requests and self._left(order) != 0:
            left_s = max(began + order.timeout_s - time.monotonic(), 0.0)
            found = self._wait(min(left_s, LOOK_S), self._left(order))
            for one in found:
                self._forget(one.sample_id)
            ended += found
            if self._hurried or time.monotonic() - began >= order.timeout_s:
                break
        self._hurried = False
        grown, again = self._grown()
        return Turned(
            begun=begun,
            passes=self._passes,
            ended=tuple(ended),
            grown=grown,
            again=again,
            tokens=self._tokens,
            busy_s=time.monotonic() - began,
        )

    def rest(self) -> int:
        """See interfaces.crew.Seat. Raises: RuntimeError with requests that the engine cannot continue."""
        if self._stream is None:
            return self._passes
        if self._resumes:
            for each in cast(ResumableStream, self._stream).take_back(keep_cache=self._keeps_cache):
                if each.token_ids:
                    self._requests[each.sample_id] = replace(self._requests[each.sample_id], begun=each)
        elif self._requests:
            raise RuntimeError(f"{len(self._requests)} responses cannot be continued: they have to end first")
        passes = self._passes
        self._close()
        return passes

    def leave(self) -> None:
        """See interfaces.crew.Seat."""
        self._requests.clear()
        self._reported.clear()
        self._reports.clear()
        self._close()
        self._earlier = 0

    def hurry(self) -> None:
        """See interfaces.crew.Seat."""
        self._hurried = True

    def _opened(self, order: Order) -> RequestStream:
        if self._stream is None:
            self._stream = self._engine.open_stream(order.sampling, self._count)
            self._stream.submit(list(self._requests.values()))
        return self._stream

    def _close(self) -> None:
        if self._stream is not None:
            self._earlier = self._passes
            self._stream.close()
            self._stream = None

    def _count(self, tokens: int) -> None:
        self._tokens += tokens

    @property
    def _passes(self) -> int:
        if self._stream is None or not self._resumes:
            return self._earlier
        return self._earlier + cast(ResumableStream, self._stream).passes

    def _left(self, order: Order) -> int | None:
        """Passes that the turn may still make; None: any number."""
        return None if order.until_pass is None else max(order.until_pass - self._passes, 0)

    def _wait(self, timeout_s: float, passes: int | None) -> list[Trajectory]:
        assert self._stream is not None
        if passes is None:
            return self._stream.wait(timeout_s)
        return cast(ResumableStream, self._stream).wait(timeout_s, passes)

    def _forget(self, name: str) -> None:
        self._requests.pop(name, None)
        self._reported.pop(name, None)
        self._reports.pop(name, None)

    def _grown(self) -> tuple[tuple[Unfinished, ...], tuple[str, ...]]:
        """Return the tokens since the last report, and the names of those that come with all of theirs: what a report refers to
        is kept until then, so that it must not be in too many pieces."""
        if not self._resumes:
            return (), ()
        again = {name for name, count in self._reports.items() if count == MOST_REPORTS}
        since = {name: 0 if name in again else count for name, count in self._reported.items()}
        grown = cast(ResumableStream, self._stream).progress(since)
        for each in grown:
            self._reported[each.sample_id] = since[each.sample_id] + len(each.token_ids)
            self._reports[each.sample_id] = 1 if each.sample_id in again else self._reports[each.sample_id] + 1
        return tuple(grown), tuple(each.sample_id for each in grown if each.sample_id in again)
