"""A sampler's turns end in time, early where it is hurried, and never without any work done."""

from __future__ import annotations

import threading
import time
from typing import Any

from posttrain.interfaces.crew import Order
from posttrain.interfaces.rollout_engine import Request
from posttrain.records.trajectories import SamplingParams, Trajectory
from posttrain.steps.seat import StreamSeat


class Stream:
    """Requests that never end."""

    def __init__(self) -> None:
        self.passes = 0

    def submit(self, requests: Any) -> None: ...

    def wait(self, timeout_s: float, passes: int | None = None) -> list[Trajectory]:
        time.sleep(min(timeout_s, 0.02))
        self.passes += 1
        return []

    def progress(self, since: Any) -> list[Any]:
        return []

    def open_stream(self, sampling: SamplingParams, on_tokens: Any = None) -> Any:
        return self


def test_a_hurried_turn_ends_at_once_and_the_next_one_does_not() -> None:
    seat = StreamSeat(Stream(), resumes=True)
    sampling = SamplingParams(max_response_tokens=8)
    order = Order(sampling=sampling, new=(Request("0/0", (1,), 8),), timeout_s=20.0)
    threading.Timer(0.1, seat.hurry).start()
    began = time.monotonic()
    assert seat.turn(order).passes >= 2
    assert time.monotonic() - began < 5.0
    seat.hurry()  # before a turn begins: it ends after one look
    short = seat.turn(Order(sampling=sampling, timeout_s=20.0))
    assert short.passes - short.begun == 1
    whole = seat.turn(Order(sampling=sampling, timeout_s=0.3))
    assert whole.passes - whole.begun > 5 and whole.busy_s >= 0.3
