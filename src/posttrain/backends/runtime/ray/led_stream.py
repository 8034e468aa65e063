"""A sampler's stream in its worker, as ``lockstep`` leads it: a turn ends after agreed passes of the model, not after seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from posttrain.backends.runtime.ray.packed import Packed
from posttrain.backends.runtime.ray.worker import GivenUp, Outbox
from posttrain.interfaces.rollout_engine import Request, ResumableStream, RolloutEngine, as_read
from posttrain.records.trajectories import SamplingParams, Trajectory, Unfinished


@dataclass(frozen=True, slots=True)
class CacheHere:
    """The keys and values of a response, which stay in the worker that computed them."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Changes of a stream's requests, taken in before anything else."""

    new: tuple[Request, ...] = ()
    cancelled: tuple[str, ...] = ()  # sample ids
    released: tuple[int, ...] = ()  # caches that nothing will continue from


@dataclass(frozen=True, slots=True, kw_only=True)
class LedTurn:
    """The result of a turn."""

    ended: tuple[Trajectory, ...]
    ended_after: tuple[int, ...]  # the pass of the turn in which each of them ended, from 1
    passes: int
    tokens: int  # sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenBack:
    """The unfinished responses of a stream."""

    responses: tuple[Unfinished, ...]


@dataclass(slots=True)
class LedStream:
    """One stream at a time, of an engine whose streams are resumable. The driver calls its methods by name.

    Args: stores, the tokens of responses go where the outbox keeps those of groups, and the driver learns where they lie.
    """

    engine: RolloutEngine
    outbox: Outbox
    take_turn: Callable[[], None]  # brings the sampler's weights to the device
    stores: bool = False
    _stream: ResumableStream | None = None
    _tokens: int = 0  # of the turn
    _caches: dict[int, object] = field(default_factory=dict)
    _stored: int = 0  # caches so far

    def open(self, sampling: SamplingParams) -> int:
        """Returns: the stream's slots."""
        self.take_turn()
        self._stream = cast(ResumableStream, self.engine.open_stream(sampling, self._count))
        return self._stream.slots

    def turn(self, changes: Changes, timeout_s: float, passes: int | None) -> Packed[LedTurn]:
        """Make exactly so many passes, or as many as there are requests for; with None, sample until a response has ended or the
        time is over."""
        stream, begun = self._changed(changes), self.stream.passes
        self._tokens = 0
        ended: list[tuple[int, Trajectory]] = []
        while True:
            before = stream.passes
            left = None if passes is None else passes - (before - begun)
            ended += [
                (stream.passes - begun, each) for each in stream.wait(timeout_s if left is None else math.inf, left)
            ]
            if passes is None or stream.passes in (before, begun + passes):
                break
        turn = LedTurn(
            ended=tuple(each for _, each in ended),
            ended_after=tuple(after for after, _ in ended),
            passes=stream.passes - begun,
            tokens=self._tokens,
        )
        return self._packed(turn)

    def progress(self, since: Mapping[str, int]) -> list[Unfinished]:
        return self.stream.progress(since)

    def take_back(self, changes: Changes, keep_cache: bool) -> Packed[TakenBack]:
        """See interfaces.rollout_engine.ResumableStream; caches stay here."""
        back = self._changed(changes).take_back(keep_cache=keep_cache)
        here = [each if each.cache is None else replace(each, cache=self._store(each.cache)) for each in back]
        return self._packed(TakenBack(responses=tuple(here)))

    def _packed(self, message: Any) -> Packed[Any]:
        return Packed.of(message, self.outbox.keep if self.stores else None)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    @property
    def stream(self) -> ResumableStream:
        assert self._stream is not None, "no stream is open"
        return self._stream

    def _changed(self, changes: Changes) -> ResumableStream:
        self.stream.cancel(changes.cancelled)
        self.stream.submit([self._with_cache(as_read(request)) for request in changes.new])
        for number in changes.released:
            self._caches.pop(number, None)
        return self.stream

    def _with_cache(self, request: Request) -> Request:
        """The request with the cache that its prefix names. A cache continues one response, once."""
        if request.begun is None or not isinstance(request.begun.cache, CacheHere):
            return request
        return replace(request, begun=replace(request.begun, cache=self._caches.pop(request.begun.cache.number)))

    def _store(self, cache: object) -> CacheHere:
        self._stored += 1
        self._caches[self._stored] = cache
        return CacheHere(self._stored)

    def _count(self, tokens: int) -> None:
        """Raises: GivenUp, in the middle of sampling, when the driver has left the step."""
        if self.outbox.given_up:
            raise GivenUp
        self._tokens += tokens
