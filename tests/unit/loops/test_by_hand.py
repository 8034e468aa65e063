"""Turns that somebody types become trajectories as sampled ones do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from posttrain.interfaces.rollout_engine import Request
from posttrain.loops.by_hand import LEFT, TypedTurns
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory

END = 0


def typed(*texts: str, limit: int = 5, end: int | None = END) -> list[Trajectory]:
    lines: Iterator[str] = iter(texts)
    player = TypedTurns(lambda _: next(lines, None), lambda text: [ord(letter) for letter in text], end)
    with player.open_stream(SamplingParams(max_response_tokens=limit)) as stream:
        stream.submit([Request(f"t{number}", (1,), limit) for number in range(max(len(texts), 1))])
        found = [each for _ in range(max(len(texts), 1)) for each in stream.wait(0.0)]
        assert stream.wait(0.0) == []
    return found


@pytest.mark.parametrize(
    ("text", "ids", "stop"),
    [
        ("abc", (97, 98, 99, END), StopReason.EOS),
        ("", (END,), StopReason.EOS),
        ("abcd", (97, 98, 99, 100, END), StopReason.EOS),
        ("abcde", (97, 98, 99, 100, 101), StopReason.LENGTH),  # no room for the end token
        ("abcdef", (97, 98, 99, 100, 101), StopReason.LENGTH),
    ],
)
def test_a_turn_ends_as_a_sampled_one(text: str, ids: tuple[int, ...], stop: StopReason) -> None:
    [response] = typed(text)
    assert (response.token_ids, response.stop_reason, len(response.logprobs)) == (ids, stop, len(ids))


def test_a_player_who_leaves_loses_the_episode() -> None:
    [response] = typed()
    assert (response.stop_reason, response.failure_reason, response.token_ids) == (StopReason.FAILED, LEFT, ())


def test_turns_are_taken_in_their_order_and_can_be_dropped() -> None:
    assert [each.sample_id for each in typed("a", "b")] == ["t0", "t1"]
    player = TypedTurns(lambda _: "a", lambda text: [1], None)
    stream = player.open_stream(SamplingParams(max_response_tokens=1))
    stream.submit([Request("x", (1,), 1), Request("y", (1,), 1)])
    stream.cancel(["x"])
    assert [(each.sample_id, each.token_ids) for each in stream.wait(0.0)] == [("y", (1,))]
