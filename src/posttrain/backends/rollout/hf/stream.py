"""A request stream over an engine that can only sample a batch to its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Self

from posttrain.interfaces.rollout_engine import Request, check_requests
from posttrain.records.trajectories import Trajectory


class LockStepStream:
    """See interfaces.rollout_engine.RequestStream. Every wait samples one batch of the submitted requests."""

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
        """Raises: RuntimeError when requests are pending."""
        if self._waiting:
            count = len(self._waiting)
            raise RuntimeError(f"the weights change while {count} responses are in progress: close the stream first")
