"""A stream of requests over several sampling workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Self

from posttrain.backends.runtime.ray.cluster import WorkerDied
from posttrain.backends.runtime.ray.columns import from_columns
from posttrain.backends.runtime.ray.watch import Member
from posttrain.backends.runtime.ray.worker import Failure
from posttrain.backends.runtime.ray.worker_group import WorkerGroup
from posttrain.errors import RunStopped
from posttrain.interfaces.rollout_engine import OnTokens, Request, check_requests
from posttrain.records.trajectories import SamplingParams, Trajectory

TURN_S = 0.2  # for which a worker samples before it looks for new requests


class RemoteStream:
    """See interfaces.rollout_engine.RequestStream.

    A conversation stays with the worker that had its first turn, which may have kept what it read; a new one goes to the worker
    with the fewest requests. ``replace`` gives another worker for a lost one, whose requests are then asked for once more;
    ``check_left`` raises when the caller has ended.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        sampling: SamplingParams,
        on_tokens: OnTokens | None,
        replace: Callable[[Member], Member],
        check_left: Callable[[], None] = lambda: None,
    ):
        self._workers = workers
        self._sampling = sampling
        self._on_tokens = on_tokens
        self._replace, self._check_left = replace, check_left
        self._homes: dict[str, Member] = {}  # conversation -> worker
        self._under_way: dict[Member, dict[str, Request]] = {member: {} for member in workers.members}
        self._new: dict[Member, list[Request]] = {member: [] for member in workers.members}
        self._cancelled: dict[Member, list[str]] = {member: [] for member in workers.members}
        self._turns: dict[Member, Any] = {}  # promises
        self._again: set[str] = set()  # requests that were sent a second time
        self._closed = False
        workers.each("open_stream", sampling, what="sampling")

    def submit(self, requests: Sequence[Request]) -> None:
        if self._closed:
            raise RuntimeError("the stream is closed")
        check_requests(requests, [name for asked in self._under_way.values() for name in asked])
        for request in requests:
            self._give(self._home(request), request)

    def wait(self, timeout_s: float) -> list[Trajectory]:
        """Raises: RunStopped when a trainer is lost, or a request's sampler a second time."""
        ended: list[Trajectory] = []
        until = time.monotonic() + timeout_s
        while not ended and any(self._under_way.values()):
            for member in list(self._under_way):
                if member.trouble:
                    self._move(member)
            for member, asked in self._under_way.items():
                if member not in self._turns and (asked or self._cancelled[member]):
                    self._turns[member] = self._turn(member)
            for promise in self._workers.cluster.ready(list(self._turns.values()), max(0.0, until - time.monotonic())):
                ended += self._take(next(each for each, given in self._turns.items() if given == promise))
            self._tell()
            self._check_left()
            if time.monotonic() >= until:
                break
        return ended

    def cancel(self, sample_ids: Collection[str]) -> None:
        for member, asked in self._under_way.items():
            for name in [each for each in sample_ids if each in asked]:
                del asked[name]
                # The request has not been sent yet.
                if name in {request.sample_id for request in self._new[member]}:
                    self._new[member] = [request for request in self._new[member] if request.sample_id != name]
                else:
                    self._cancelled[member].append(name)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        here = [member for member in self._under_way if not member.trouble]
        for member in here:
            self._workers.cluster.call(member.handle, "give_up")
        cluster = self._workers.cluster
        closing = {member: cluster.call(member.handle, "call", "close_stream", True) for member in here}
        self._workers.watch.wait(closing, "closing a stream", self._workers.timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _home(self, request: Request) -> Member:
        home = self._homes.get(request.conversation) if request.conversation else None
        if home is None or home not in self._under_way:
            home = min(self._under_way, key=lambda member: len(self._under_way[member]))
            if request.conversation:
                self._homes[request.conversation] = home
        return home

    def _give(self, member: Member, request: Request) -> None:
        self._under_way[member][request.sample_id] = request
        self._new[member].append(request)

    def _turn(self, member: Member) -> Any:
        new, cancelled = self._new[member], self._cancelled[member]
        self._new[member], self._cancelled[member] = [], []
        return self._workers.cluster.call(member.handle, "call", "sample", True, new, cancelled, TURN_S)

    def _take(self, member: Member) -> list[Trajectory]:
        try:
            result = self._workers.cluster.value(self._turns.pop(member), self._workers.timeout_s)
        except WorkerDied as died:
            self._workers.watch.found_dead(member, died)
            return []
        if isinstance(result, Failure):
            raise result.error(member.name)
        asked = self._under_way[member]
        ended = from_columns(result) if result else []
        return [each for each in ended if asked.pop(each.sample_id, None) is not None]

    def _move(self, lost: Member) -> None:
        """Send the requests of a lost worker to another one."""
        self._turns.pop(lost, None)
        requests = self._under_way.pop(lost)
        del self._new[lost], self._cancelled[lost]
        if twice := sorted(self._again & set(requests)):
            raise RunStopped(
                f"{lost.lost()}\nIt is the second worker lost while it sampled {twice[0]}: it is not tried again"
            )
        self._again |= set(requests)
        new = self._replace(lost)
        if new not in self._under_way:
            self._under_way[new], self._new[new], self._cancelled[new] = {}, [], []
            opening = self._workers.cluster.call(new.handle, "call", "open_stream", True, self._sampling)
            self._workers.watch.wait({new: opening}, "sampling", self._workers.timeout_s)
        for request in requests.values():
            self._give(new, request)

    def _tell(self) -> None:
        tokens = sum(member.take()[0] for member in self._under_way)
        if tokens and self._on_tokens:
            self._on_tokens(tokens)
