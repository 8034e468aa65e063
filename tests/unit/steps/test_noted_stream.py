"""Requests come at the passes that were recorded, whenever they are submitted."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import pytest

from posttrain.asynchrony.passes import Due, PostScript
from posttrain.errors import RunStopped
from posttrain.interfaces.rollout_engine import Request, ResumableStream
from posttrain.records.trajectories import Trajectory
from posttrain.steps.noted_stream import FollowingStream, NotedStream


class Counting:
    """A stream that makes all the passes that it may, and ends nothing."""

    slots = 4

    def __init__(self) -> None:
        self.passes = 0
        self.seen: list[tuple[int, list[str], list[str]]] = []
        self.busy = True

    def submit(self, requests: Sequence[Request]) -> None:
        self.seen.append((self.passes, [each.sample_id for each in requests], []))

    def cancel(self, sample_ids: Collection[str]) -> None:
        self.seen[-1][2].extend(sample_ids)

    def wait(self, timeout_s: float, passes: int | None = None) -> list[Trajectory]:
        self.passes += (1 if passes is None else passes) if self.busy else 0
        return []

    def take_back(self, *, keep_cache: bool = False) -> list[Any]:
        return []


def request(name: str) -> Request:
    return Request(name, (1, 2), 8)


def test_what_is_noted_is_followed() -> None:
    events: list[tuple[str, Mapping[str, Any]]] = []
    first = Counting()
    noted = NotedStream(cast(ResumableStream, first), lambda event, values: events.append((event, dict(values))))
    noted.submit([request("a"), request("b")])
    for _ in range(3):
        noted.wait(0.0)
    noted.cancel(["b"])
    noted.submit([request("c")])
    noted.wait(0.0)
    noted.take_back()
    assert [(event, values["pass"]) for event, values in events] == [
        ("order", 0),
        ("order", 3),
        ("order", 3),
        ("rest", 4),
    ]

    dues = [Due(cast(Any, e), v["pass"], tuple(v.get("sent", ())), tuple(v.get("cancelled", ()))) for e, v in events]
    again: list[tuple[str, Mapping[str, Any]]] = []
    second = Counting()
    following = FollowingStream(
        cast(ResumableStream, second), lambda event, values: again.append((event, dict(values))), PostScript(dues)
    )
    following.submit([request("c"), request("b")])  # c comes too early, and a too late
    following.wait(0.0)
    assert second.passes == 0 and not second.seen
    following.submit([request("a")])
    following.wait(0.0)
    assert second.passes == 3 and second.seen == [(0, ["a", "b"], [])]
    following.wait(0.0)
    assert second.passes == 3  # b is not withdrawn yet
    following.cancel(["b"])
    following.wait(0.0)
    assert second.passes == 4 and following.rests
    following.wait(0.0)
    assert second.passes == 4
    following.take_back()
    assert again == events and second.seen == first.seen


def test_requests_for_a_pass_that_never_comes_are_named() -> None:
    stream = Counting()
    stream.busy = False
    following = FollowingStream(
        cast(ResumableStream, stream), lambda event, values: None, PostScript([Due("order", 5, ("a",)), Due("rest", 9)])
    )
    following.submit([request("a")])
    with pytest.raises(RunStopped, match="nothing is sampled after pass 0, and its next requests come after pass 5"):
        following.wait(0.0)
