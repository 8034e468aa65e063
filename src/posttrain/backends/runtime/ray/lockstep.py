"""A resumable stream over sampling workers that advance by the same number of passes, so that decisions count no seconds.

In a turn every worker makes ``PASSES`` passes of its model, or as many as it has requests for, and all are waited for. What has
ended in the turn is returned in the order of passes, and within a pass in that of ranks. The turns of a stream, and who samples
what, are therefore a function of the requests and the weights, however fast each worker is. One worker alone is waited for
until a response ends: it makes the very passes of a sampler in the driver's process.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from posttrain.algos.balancing import balanced_parts
from posttrain.backends.runtime.ray.led_stream import CacheHere, Changes, LedTurn, TakenBack
from posttrain.backends.runtime.ray.watch import Member
from posttrain.backends.runtime.ray.worker_group import WorkerGroup
from posttrain.interfaces.rollout_engine import OnTokens, Request, check_requests
from posttrain.records.trajectories import SamplingParams, Trajectory, Unfinished

# Passes of a turn of several workers. A call of a worker takes 1 to 2 ms beside passes of 5 to 30 ms on a GPU; on the other side
# the slot of a response that has ended is free for up to so many passes less one.
PASSES = 8


@dataclass(frozen=True, eq=False)
class HeldCache:
    """The keys and values of an unfinished response in a worker, for as long as this is kept."""

    member: Member
    place: CacheHere


class HeldCaches:
    """The caches in workers, over all streams of a run."""

    def __init__(self) -> None:
        self._released: dict[Member, list[int]] = {}

    def hold(self, member: Member, place: CacheHere) -> HeldCache:
        cache = HeldCache(member, place)
        let_go = self._released.setdefault(member, []).append
        weakref.finalize(cache, let_go, place.number).atexit = False
        return cache

    def released(self, member: Member) -> tuple[int, ...]:
        """Return those that nothing here refers to any more, once."""
        found = self._released.get(member, [])
        numbers = tuple(found)
        del found[: len(numbers)]
        return numbers


class LockstepStream:
    """See interfaces.rollout_engine.ResumableStream.

    A conversation stays with the worker that had its first turn, and a response with the one that holds its cache. Fresh requests
    with the same prompt that are submitted together stay together, because their prompt is read once. The first ones are divided
    as ``generate`` divides prompts, by tokens; later ones go to the worker with the fewest requests, the first of equals.
    """

    def __init__(self, workers: WorkerGroup, sampling: SamplingParams, on_tokens: OnTokens | None, caches: HeldCaches):
        self.passes = 0
        self._workers, self._on_tokens, self._caches = workers, on_tokens, caches
        self._conversations: dict[str, Member] = {}  # that have had a turn
        self._asked: dict[str, Member] = {}  # by sample id, in the order of submission
        self._new: dict[Member, list[Request]] = {member: [] for member in workers.members}
        self._cancelled: dict[Member, list[str]] = {member: [] for member in workers.members}
        self._closed = False
        self.slots: int = sum(workers.each("led.open", sampling, what="sampling"))

    def submit(self, requests: Sequence[Request]) -> None:
        if self._closed:
            raise RuntimeError("the stream is closed")
        check_requests(requests, self._asked)
        units: dict[object, list[Request]] = {}
        for request in requests:
            fresh = request.begun is None and not request.conversation
            units.setdefault(request.token_ids if fresh else request.sample_id, []).append(request)
        homes = self._homes_of(list(units.values()))
        home = {each.sample_id: member for member, unit in zip(homes, units.values(), strict=True) for each in unit}
        for request in requests:
            self._asked[request.sample_id] = home[request.sample_id]
            self._new[home[request.sample_id]].append(request)

    def wait(self, timeout_s: float, passes: int | None = None) -> list[Trajectory]:
        """Raises: RunStopped when a worker is lost, or does not answer in time; what sampling raises."""
        until, last = time.monotonic() + timeout_s, None if passes is None else self.passes + passes
        while self._asked:
            ended = self._turn(timeout_s, None if last is None else last - self.passes)
            if ended or time.monotonic() >= until or self.passes == last:
                return ended
        return []

    def cancel(self, sample_ids: Collection[str]) -> None:
        for name in [each for each in sample_ids if each in self._asked]:
            member = self._asked.pop(name)
            unsent = [request for request in self._new[member] if request.sample_id != name]
            if len(unsent) == len(self._new[member]):
                self._cancelled[member].append(name)
            self._new[member] = unsent

    def progress(self, since: Mapping[str, int]) -> list[Unfinished]:
        found = self._workers.each("led.progress", since, what="sampling")
        return [each for part in found for each in part if each.sample_id in self._asked]

    def take_back(self, *, keep_cache: bool = False) -> list[Unfinished]:
        arguments = [(self._changes(member), keep_cache) for member in self._workers.members]
        found = self._workers.scatter("led.take_back", arguments, what="sampling")
        parts: list[TakenBack] = [each.unpacked() for each in found]
        back = {
            each.sample_id: self._held(member, each)
            for member, part in zip(self._workers.members, parts, strict=True)
            for each in part.responses
        }
        asked = list(self._asked)
        self._asked.clear()
        return [back[name] for name in asked]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        cluster, here = self._workers.cluster, [each for each in self._workers.members if not each.trouble]
        for member in here:
            cluster.call(member.handle, "give_up")
        closing = {member: cluster.call(member.handle, "call", "led.close", True) for member in here}
        self._workers.watch.wait(closing, "closing a stream", self._workers.timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _turn(self, timeout_s: float, passes: int | None) -> list[Trajectory]:
        members = self._workers.members
        if len(members) > 1:
            passes = PASSES if passes is None else min(passes, PASSES)
        busy = [each for each in members if each in self._asked.values() or self._cancelled[each]]
        promises: dict[Member, Any] = {
            member: self._workers.cluster.call(
                member.handle, "call", "led.turn", True, self._changes(member), timeout_s, passes
            )
            for member in busy
        }
        answers = self._workers.watch.wait(promises, "sampling", self._workers.timeout_s)
        turns: dict[Member, LedTurn] = {member: each.unpacked() for member, each in answers.items()}
        found = [
            (at, rank, each)
            for rank, member in enumerate(busy)
            for at, each in zip(turns[member].ended_after, turns[member].ended, strict=True)
        ]
        ended = [each for *_, each in sorted(found, key=lambda one: one[:2]) if self._asked.pop(each.sample_id, None)]
        self.passes += max(turn.passes for turn in turns.values())
        if self._on_tokens:
            self._on_tokens(sum(turn.tokens for turn in turns.values()))
        return ended

    def _changes(self, member: Member) -> Changes:
        """The changes of a worker's requests since the last call."""
        new, cancelled = self._new[member], self._cancelled[member]
        self._new[member], self._cancelled[member] = [], []
        return Changes(
            new=tuple(_on_the_wire(each) for each in new),
            cancelled=tuple(cancelled),
            released=self._caches.released(member),
        )

    def _homes_of(self, units: Sequence[Sequence[Request]]) -> list[Member]:
        """The workers of requests that stay together."""
        homes = [self._home(unit[0]) for unit in units]
        members = self._workers.members[: len(units)]
        if units and not self._asked and not any(homes):
            loads = [unit[0].length + sum(_tokens_left(each) for each in unit) for unit in units]
            parts = zip(members, balanced_parts(loads, len(members)), strict=True)
            of = {number: member for member, numbers in parts for number in numbers}
            homes = [of[number] for number in range(len(units))]
        loads_of = Counter(self._asked.values())
        for number, unit in enumerate(units):
            home = homes[number] or self._home(unit[0]) or min(self._workers.members, key=loads_of.__getitem__)
            homes[number] = home
            loads_of[home] += len(unit)
            if unit[0].conversation:
                self._conversations[unit[0].conversation] = home
        return [home for home in homes if home]

    def _home(self, request: Request) -> Member | None:
        if request.begun and isinstance(request.begun.cache, HeldCache):
            return request.begun.cache.member
        return self._conversations.get(request.conversation) if request.conversation else None

    def _held(self, member: Member, back: Unfinished) -> Unfinished:
        if not isinstance(back.cache, CacheHere):
            return back
        return replace(back, cache=self._caches.hold(member, back.cache))


def _tokens_left(request: Request) -> int:
    return request.max_response_tokens - (len(request.begun.token_ids) if request.begun else 0)


def _on_the_wire(request: Request) -> Request:
    """A request whose cache is named as its worker knows it."""
    if request.begun is None or not isinstance(request.begun.cache, HeldCache):
        return request
    return replace(request, begun=replace(request.begun, cache=request.begun.cache.place))
