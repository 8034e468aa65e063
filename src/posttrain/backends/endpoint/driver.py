"""The only thread that uses the sampler: requests of all threads go in, responses come out as futures."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from typing import TypeVar

from posttrain.interfaces.rollout_engine import Request, TurnSampler
from posttrain.records.trajectories import SamplingParams, Trajectory

Item = TypeVar("Item")

_SAMPLE_S = 0.02  # sampling time between two checks for new requests
_IDLE_S = 0.2  # waiting time for a request when none is in progress


class Closed(Exception):
    """The endpoint is closing, or its sampler has failed."""


class Driver:
    """Samples submitted requests, all with the same settings, until it is closed."""

    def __init__(self, engine: TurnSampler, sampling: SamplingParams):
        self._engine = engine
        self._sampling = sampling
        self._inbox: queue.SimpleQueue[tuple[Request, Future[Trajectory]]] = queue.SimpleQueue()
        self._given_up: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self.failure: BaseException | None = None  # the error that ended the sampler

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, request: Request) -> Future[Trajectory]:
        """Submit a request. Returns: the future of its response. Raises: Closed."""
        if self._closing.is_set():
            raise Closed
        future: Future[Trajectory] = Future()
        self._inbox.put((request, future))
        return future

    def give_up(self, sample_id: str) -> None:
        """Cancel a request whose client no longer waits."""
        self._given_up.put(sample_id)

    def close(self) -> None:
        """Cancel all requests, and wait until the sampler is closed."""
        self._closing.set()
        if self.alive:
            self._thread.join()

    def _run(self) -> None:
        waiting: dict[str, Future[Trajectory]] = {}
        try:
            with self._engine.open_stream(self._sampling) as stream:
                while not self._closing.is_set():
                    for request, future in self._arrived(idle=not waiting):
                        try:
                            stream.submit([request])
                        except ValueError as error:  # the request is invalid; the others are not affected
                            future.set_exception(error)
                        else:
                            waiting[request.sample_id] = future
                    gone = [name for name in _all(self._given_up) if waiting.pop(name, None)]
                    stream.cancel(gone)
                    if waiting:
                        for response in stream.wait(_SAMPLE_S):
                            waiting.pop(response.sample_id).set_result(response)
        except BaseException as error:  # noqa: BLE001 - all waiting clients must receive the error
            self.failure = error
        finally:
            self._closing.set()
            for future in [*waiting.values(), *(future for _, future in _all(self._inbox))]:
                future.set_exception(Closed())

    def _arrived(self, *, idle: bool) -> list[tuple[Request, Future[Trajectory]]]:
        if not idle:
            return _all(self._inbox)
        try:
            return [self._inbox.get(timeout=_IDLE_S), *_all(self._inbox)]
        except queue.Empty:
            return []


def _all(waiting: queue.SimpleQueue[Item]) -> list[Item]:
    """Take all items of a queue."""
    found = []
    while True:
        try:
            found.append(waiting.get_nowait())
        except queue.Empty:
            return found
