"""Several models behind one server: their samplers take turns on the device, and their threads start and end together."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, Self

from posttrain.backends.endpoint.server import Working
from posttrain.interfaces.rollout_engine import OnTokens, Request, RequestStream, TurnSampler
from posttrain.records.trajectories import SamplingParams, Trajectory


class Turns:
    """A lock that waiting threads get in the order of their arrival: with a plain one, a thread that takes it again at once can
    starve the others."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

    def __enter__(self) -> None:
        place = object()
        with self._changed:
            self._waiting.append(place)
            self._changed.wait_for(lambda: self._waiting[0] is place)

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._waiting.popleft()
            self._changed.notify_all()


class InTurn:
    """A sampler whose streams compute only in their turn, so that models share cores and device memory bandwidth evenly and no
    two of them compute at a time."""

    def __init__(self, engine: TurnSampler, turns: Turns):
        self._engine = engine
        self._turns = turns

    def open_stream(self, sampling: SamplingParams, on_tokens: OnTokens | None = None) -> StreamInTurn:
        return StreamInTurn(self._engine.open_stream(sampling, on_tokens), self._turns)


class StreamInTurn:
    """A stream that samples in its turn; all but ``wait`` is the stream's own."""

    def __init__(self, stream: RequestStream, turns: Turns):
        self._stream = stream
        self._turns = turns

    def submit(self, requests: Sequence[Request]) -> None:
        self._stream.submit(requests)

    def wait(self, timeout_s: float, passes: int | None = None) -> list[Trajectory]:
        limit = {} if passes is None else {"passes": passes}  # which only streams that can be resumed know
        with self._turns:
            return self._stream.wait(timeout_s, **limit)

    def cancel(self, sample_ids: Collection[str]) -> None:
        self._stream.cancel(sample_ids)

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Self:
        self._stream.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stream.__exit__(*exception)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Together:
    """The threads behind a server of several models: one that fails ends all."""

    def __init__(self, workers: Sequence[Working]):
        self._workers = workers

    def start(self) -> None:
        for worker in self._workers:
            worker.start()

    @property
    def alive(self) -> bool:
        return all(worker.alive for worker in self._workers)

    @property
    def failure(self) -> BaseException | None:
        return next((worker.failure for worker in self._workers if worker.failure is not None), None)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
