"""The only thread that uses the sampler: requests of all threads go in, responses come out as futures."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar, cast

from posttrain.interfaces.rollout_engine import Request, RequestStream, ResumableStream, TurnSampler
from posttrain.records.trajectories import SamplingParams, Trajectory, Unfinished

Item = TypeVar("Item")
OnProgress = Callable[[Unfinished], None]  # called in the driver's thread, with the tokens since the last call

_SAMPLE_S = 0.02  # sampling time between two checks for new requests
_IDLE_S = 0.2  # waiting time for a request when none is in progress
_ALL_SEEN = 1 << 62  # tokens, of requests whose progress is not reported


class Closed(Exception):
    """The endpoint is closing, or its sampler has failed."""


@dataclass(slots=True)
class _Waiting:
    """A request in progress."""

    future: Future[Trajectory]
    on_progress: OnProgress | None
    seen: int = 0  # tokens that were reported


class Driver:
    """Samples submitted requests, all with the same settings, until it is closed."""

    def __init__(self, engine: TurnSampler, sampling: SamplingParams):
        self._engine = engine
        self._sampling = sampling
        self._inbox: queue.SimpleQueue[tuple[Request, _Waiting]] = queue.SimpleQueue()
        self._given_up: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self.failure: BaseException | None = None  # the error that ended the sampler

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, request: Request, on_progress: OnProgress | None = None) -> Future[Trajectory]:
        """Submit a request. ``on_progress`` is for samplers whose streams report it (ResumableStream). Returns: the future of its
        response. Raises: Closed."""
        if self._closing.is_set():
            raise Closed
        waiting = _Waiting(Future(), on_progress)
        self._inbox.put((request, waiting))
        return waiting.future

    def give_up(self, sample_id: str) -> None:
        """Cancel a request whose client no longer waits."""
        self._given_up.put(sample_id)

    def close(self) -> None:
        """Cancel all requests, and wait until the sampler is closed."""
        self._closing.set()
        if self.alive:
            self._thread.join()

    def _run(self) -> None:
        waiting: dict[str, _Waiting] = {}
        try:
            with self._engine.open_stream(self._sampling) as stream:
                while not self._closing.is_set():
                    for request, each in self._arrived(idle=not waiting):
                        try:
                            stream.submit([request])
                        except ValueError as error:  # the request is invalid; the others are not affected
                            each.future.set_exception(error)
                        else:
                            waiting[request.sample_id] = each
                    gone = [name for name in _all(self._given_up) if waiting.pop(name, None)]
                    stream.cancel(gone)
                    if waiting:
                        for response in stream.wait(_SAMPLE_S):
                            waiting.pop(response.sample_id).future.set_result(response)
                        _report(stream, waiting)
        except BaseException as error:  # noqa: BLE001 - all waiting clients must receive the error
            self.failure = error
        finally:
            self._closing.set()
            for each in [*waiting.values(), *(each for _, each in _all(self._inbox))]:
                each.future.set_exception(Closed())

    def _arrived(self, *, idle: bool) -> list[tuple[Request, _Waiting]]:
        if not idle:
            return _all(self._inbox)
        try:
            return [self._inbox.get(timeout=_IDLE_S), *_all(self._inbox)]
        except queue.Empty:
            return []


def _report(stream: RequestStream, waiting: Mapping[str, _Waiting]) -> None:
    """Report the new tokens of the requests that are watched."""
    if not any(each.on_progress for each in waiting.values()):
        return
    seen = {name: each.seen if each.on_progress else _ALL_SEEN for name, each in waiting.items()}
    for grown in cast(ResumableStream, stream).progress(seen):
        each = waiting[grown.sample_id]
        assert each.on_progress is not None
        each.seen += len(grown.token_ids)
        each.on_progress(grown)


def _all(waiting: queue.SimpleQueue[Item]) -> list[Item]:
    """Take all items of a queue."""
    found = []
    while True:
        try:
            found.append(waiting.get_nowait())
        except queue.Empty:
            return found
