"""A sampler's turns end in time, early where it is hurried, and never without any work done."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from posttrain.interfaces.crew import Order
from posttrain.interfaces.rollout_engine import Request
from posttrain.records.trajectories import SamplingParams, Trajectory, Unfinished
from posttrain.steps import seat as seat_module
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


class Growing(Stream):
    """A request that gains a token with every pass: the number of the pass."""

    def progress(self, since: Any) -> list[Unfinished]:
        tokens = tuple(range(self.passes))
        parts = [(name, tokens[start:]) for name, start in since.items()]
        return [Unfinished(sample_id=n, token_ids=p, logprobs=(0.0,) * len(p), spans=()) for n, p in parts]


def test_every_so_many_reports_bring_all_tokens_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seat_module, "MOST_REPORTS", 2)
    seat = StreamSeat(Growing(), resumes=True)
    sampling = SamplingParams(max_response_tokens=99)
    order = Order(sampling=sampling, new=(Request("0/0", (1,), 99),), timeout_s=0.0)
    reports = []
    for _ in range(5):
        turned = seat.turn(order)
        reports.append(([each.token_ids for each in turned.grown], turned.again))
        order = Order(sampling=sampling, timeout_s=0.0)
    assert reports == [([(0,)], ()), ([(1,)], ()), ([(0, 1, 2)], ("0/0",)), ([(3,)], ()), ([(0, 1, 2, 3, 4)], ("0/0",))]
