"""A stream over an engine that can sample a batch to its end, and nothing else."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Self

from posttrain.interfaces.rollout_engine import Request, check_requests
from posttrain.records.trajectories import Trajectory


class LockStepStream:
    """See interfaces.rollout_engine.RequestStream. In every wait, as much of what was submitted as fits into a batch is
    sampled."""

    def __init__(self, sample: Callable[[deque[Request]], list[Trajectory]]):
        self.closed = False
        self._sample = sample  # takes a batch from the queue
        self._waiting: deque[Request] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(self, requests: Sequence[Request]) -> None:
        if self.closed:
            raise RuntimeError("the stream is closed")
        check_requests(requests, {request.sample_id for request in self._waiting})
        self._waiting += requests

    def wait(self, timeout_s: float) -> list[Trajectory]:
        return self._sample(self._waiting) if self._waiting else []

    def cancel(self, sample_ids: Collection[str]) -> None:
        self._waiting = deque(request for request in self._waiting if request.sample_id not in sample_ids)

    def close(self) -> None:
        self.closed = True
        self._waiting.clear()

    def refuse_new_weights(self) -> None:
        """Raises: RuntimeError when something waits to be sampled."""
        if self._waiting:
            count = len(self._waiting)
            raise RuntimeError(f"the weights change while {count} responses are under way: close the stream before")
