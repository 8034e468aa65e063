"""A fleet of samplers without a model: where requests go, what a lost sampler leaves, and waits that have an end and a name."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from posttrain.asynchrony.passes import Awaited, Passes
from posttrain.errors import RunStopped
from posttrain.interfaces.crew import Order, SamplerLost, Turned
from posttrain.interfaces.rollout_engine import Request
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory, Unfinished, VersionSpan
from posttrain.steps import fleet as fleet_module
from posttrain.steps.fleet import MOST_LOSSES, Fleet
from posttrain.steps.own_thread import OwnThread
from posttrain.steps.posts import TurnLength

LENGTH = 3  # tokens of every response


class Sampler:
    """Gives every request a token per turn: the number of the token."""

    def __init__(self, name: str):
        self.name = name
        self.trouble: str | None = None
        self.requests: dict[str, list[int]] = {}
        self.orders: list[Order] = []
        self.hurried = 0

    def turn(self, order: Order) -> Turned:
        self.orders.append(order)
        for request in order.new:
            self.requests[request.sample_id] = list(request.begun.token_ids) if request.begun else []
        for name in order.cancelled:
            del self.requests[name]
        grown, ended = [], []
        for name, tokens in list(self.requests.items()):
            tokens.append(len(tokens))
            if len(tokens) == LENGTH:
                ended.append(response(name, self.requests.pop(name)))
            else:
                new = (tokens[-1],)
                span = (VersionSpan(0, 0),)
                grown.append(Unfinished(sample_id=name, token_ids=new, logprobs=(0.0,), spans=span))
        turns = len(self.orders)
        return Turned(
            begun=turns - 1, passes=turns, ended=tuple(ended), grown=tuple(grown), tokens=len(grown), busy_s=0.0
        )

    def rest(self) -> int:
        return len(self.orders)

    def leave(self) -> None:
        self.requests.clear()


def response(name: str, tokens: list[int]) -> Trajectory:
    return Trajectory(
        sample_id=name,
        token_ids=tuple(tokens),
        logprobs=(0.0,) * len(tokens),
        text="",
        stop_reason=StopReason.EOS,
        policy_version=0,
    )


class Crew:
    """Samplers that answer at once, unless they are lost."""

    resumes = True
    joiners = 0

    def __init__(self, *names: str):
        self.all = [Sampler(name) for name in names]

    def members(self) -> list[Sampler]:
        return self.all

    def call(self, member: Sampler, method: str, *arguments: Any) -> Any:
        return partial(getattr(member, method), *arguments)

    def ready(self, promises: Collection[Any], timeout_s: float) -> Collection[Any]:
        return list(promises)

    def value(self, member: Sampler, promise: Any) -> Any:
        if member.trouble:
            raise SamplerLost(f"{member.name} {member.trouble}")
        return promise()

    def hurry(self, member: Sampler) -> None:
        member.hurried += 1

    def drop(self, member: Sampler) -> None:
        self.all.remove(member)


def fleet_of(crew: Crew) -> tuple[Fleet, list[tuple[str, int, dict[str, Any]]]]:
    events: list[tuple[str, int, dict[str, Any]]] = []
    fleet = Fleet(
        crew,  # type: ignore[arg-type]
        SamplingParams(max_response_tokens=8),
        hear=lambda: None,
        record=lambda event, sampler, values: events.append((event, sampler, values)),
    )
    fleet.served(0, "hash")
    return fleet, events


def replaying(schedule: list[dict[str, Any]], crew: Crew) -> Fleet:
    return Fleet(
        crew,  # type: ignore[arg-type]
        SamplingParams(max_response_tokens=8),
        hear=lambda: None,
        record=lambda *more: None,
        again=replace(Passes.of(schedule), most=1),
    )


def test_a_rest_for_a_sampler_that_joins_is_told_from_the_end_of_a_step() -> None:
    """Step 1 chooses twice; in the second wait the sampler rests at pass 0 and another one joins, and both rest at its end."""
    schedule = [
        {"step": 1, "event": "joined", "sampler": 0, "version": 0},
        {"step": 1, "event": "ready"},
        {"step": 1, "event": "rest", "sampler": 0, "pass": 0},
        {"step": 1, "event": "joined", "sampler": 1, "version": 0},
        {"step": 1, "event": "ready"},
        {"step": 1, "event": "rest", "sampler": 0, "pass": 0},
        {"step": 1, "event": "rest", "sampler": 1, "pass": 0},
        {"step": 1, "event": "synced"},
    ]
    crew = Crew("a")
    fleet = replaying(schedule, crew)
    fleet.served(0, "hash")
    first, second, ended = Awaited(1, 0), Awaited(1, 1), Awaited(1, 2)
    assert not fleet.will_take_in(first) and not fleet.takes_in(first)
    assert fleet.will_take_in(second) and fleet.takes_in(second)
    assert fleet.at_rest()
    crew.all.append(Sampler("b"))
    fleet.served(0, "hash")
    fleet.go()
    assert fleet.samplers == 2
    assert not fleet.will_take_in(second) and not fleet.takes_in(second)
    assert fleet.at_rest()  # the end of the step, for which no choice waits
    assert not fleet.takes_in(ended)


def test_a_sampler_that_is_ready_sooner_joins_no_sooner_than_it_did() -> None:
    """Recorded: sampler 1 joined while step 2 waited, with the weights that the end of step 1 had sent."""
    schedule = [
        {"step": 1, "event": "joined", "sampler": 0, "version": 0},
        {"step": 1, "event": "weights", "sampler": 0, "version": 0},
        {"step": 1, "event": "ready"},
        {"step": 1, "event": "rest", "sampler": 0, "pass": 0},
        {"step": 1, "event": "weights", "sampler": 0, "version": 2},
        {"step": 1, "event": "synced"},
        {"step": 2, "event": "order", "sampler": 0, "pass": 0, "sent": ["0/0"], "cancelled": []},
        {"step": 2, "event": "rest", "sampler": 0, "pass": 1},
        {"step": 2, "event": "joined", "sampler": 1, "version": 2},
    ]
    crew = Crew("a")
    fleet = replaying(schedule, crew)
    fleet.served(0, "hash")
    crew.all.append(Sampler("b"))
    assert fleet.at_rest()
    fleet.served(2, "hash")
    fleet.go()
    assert fleet.samplers == 1  # its rest at pass 1 is still to come
    fleet.submit(requests("0/0"))
    fleet.wait(1.0)
    assert fleet.takes_in(Awaited(2, 0)) and fleet.at_rest()
    fleet.served(2, "hash")
    assert fleet.samplers == 2


def requests(*names: str) -> list[Request]:
    return [Request(name, (1,), 8) for name in names]


def test_requests_go_to_the_sampler_with_the_fewest_and_end_once() -> None:
    crew = Crew("a", "b")
    fleet, _ = fleet_of(crew)
    fleet.submit(requests("0/0", "0/1", "1/0"))
    ended = [one.sample_id for _ in range(LENGTH) for one in fleet.wait(1.0)]
    assert sorted(ended) == ["0/0", "0/1", "1/0"]
    assert [[each.sample_id for each in one.orders[0].new] for one in crew.all] == [["0/0", "1/0"], ["0/1"]]
    assert fleet.progress() == []


def test_a_conversation_stays_where_it_began_and_the_oldest_of_many_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run of many steps has no list of all its conversations."""
    monkeypatch.setattr(fleet_module, "MOST_HOMES", 2)
    crew = Crew("a", "b")
    fleet, _ = fleet_of(crew)

    def home_of(conversation: str, turn: int) -> str:
        fleet.submit([Request(f"{conversation}@{turn}", (1,), 8, conversation=conversation)])
        fleet.wait(1.0)
        [post] = [post for post in fleet._posts if f"{conversation}@{turn}" in post.asked]
        return str(post.member.name)

    assert [home_of("x", 0), home_of("y", 0), home_of("x", 1), home_of("x", 2)] == ["a", "b", "a", "a"]
    home_of("z", 0)
    assert list(fleet._homes) == ["x", "z"]


def test_a_lost_sampler_s_requests_go_on_elsewhere_with_their_tokens() -> None:
    crew = Crew("a", "b")
    fleet, events = fleet_of(crew)
    fleet.submit(requests("0/0", "0/1"))
    fleet.wait(1.0)
    lost, left = crew.all
    lost.trouble = "has died"
    ended = [one for _ in range(4) for one in fleet.wait(1.0)]
    assert sorted(one.sample_id for one in ended) == ["0/0", "0/1"]
    assert {one.token_ids for one in ended} == {(0, 1, 2)}
    [moved] = [each for order in left.orders[1:] for each in order.new]
    assert moved.sample_id == "0/0" and moved.begun is not None and moved.begun.token_ids[:1] == (0,)
    assert ("lost", 0, {"pass": 1, "reason": "has died"}) in events


def test_a_replay_gives_requests_first_to_the_sampler_that_was_lost_with_them() -> None:
    """The other one got them afterwards. It comes to that pass before they are there, and took them from the first."""
    schedule = [
        {"step": 1, "event": "joined", "sampler": 0, "version": 0},
        {"step": 1, "event": "joined", "sampler": 1, "version": 0},
        {"step": 1, "event": "order", "sampler": 0, "pass": 0, "sent": ["0/0"], "cancelled": []},
        {"step": 1, "event": "order", "sampler": 1, "pass": 0, "sent": ["0/1"], "cancelled": []},
        {"step": 1, "event": "lost", "sampler": 1, "pass": 0},
        {"step": 1, "event": "order", "sampler": 0, "pass": 1, "sent": ["0/1"], "cancelled": []},
    ]
    crew = Crew("a", "b")
    fleet = Fleet(
        crew,  # type: ignore[arg-type]
        SamplingParams(max_response_tokens=8),
        hear=lambda: None,
        record=lambda *more: None,
        again=Passes.of(schedule),
    )
    fleet.served(0, "hash")
    kept, lost = crew.all
    fleet.submit(requests("0/0"))
    fleet.wait(1.0)
    assert [each.sample_id for each in kept.orders[0].new] == ["0/0"] and not lost.orders
    fleet.submit(requests("0/1"))
    ended = [one.sample_id for _ in range(6) for one in fleet.wait(1.0)]
    assert sorted(ended) == ["0/0", "0/1"]
    assert [each.sample_id for each in lost.orders[0].new] == ["0/1"]


def test_a_request_that_kills_samplers_stops_the_run() -> None:
    crew = Crew(*(f"s{number}" for number in range(MOST_LOSSES)))
    fleet, _ = fleet_of(crew)
    fleet.submit(requests("7/0"))
    with pytest.raises(RunStopped, match=r"sampler number 3 that is lost while it sampled 7/0 without a token of it"):
        for _ in range(20):
            fleet._drop_the_lost()
            fleet._give_orders()
            next(post for post in fleet._posts if post.asked).member.trouble = "has died"


def test_a_group_that_is_dropped_leaves_its_sampler() -> None:
    crew = Crew("a")
    fleet, _ = fleet_of(crew)
    fleet.submit(requests("1/0", "11/0"))
    fleet.wait(1.0)
    fleet.cancel_groups([1])
    ended = [one.sample_id for _ in range(LENGTH) for one in fleet.wait(1.0)]
    assert ended == ["11/0"] and crew.all[0].orders[1].cancelled == ("1/0",)


def test_at_rest_nothing_is_sampled_and_no_request_is_sent() -> None:
    crew = Crew("a")
    fleet, events = fleet_of(crew)
    fleet.submit(requests("0/0"))
    fleet.wait(1.0)
    assert fleet.at_rest()
    before = len(crew.all[0].orders)
    fleet.submit(requests("0/1"))
    assert fleet.wait(0.0) == [] and len(crew.all[0].orders) == before
    fleet.go()
    fleet.wait(1.0)
    assert len(crew.all[0].orders) == before + 1
    assert ("rest", 0, {"pass": before}) in events


class TestOwnThread:
    def test_questions_are_answered_between_pieces_of_work(self) -> None:
        inside = threading.Lock()

        def work() -> None:
            with inside:
                time.sleep(0.005)

        thread = OwnThread("the thread", work, 5.0)
        thread.start()
        assert thread.ask(lambda: inside.locked()) is False
        thread.pause(lambda: True, lambda: "")
        assert inside.acquire(timeout=0.0)  # the work stands still
        inside.release()
        thread.go()
        thread.stop()
        assert thread.ask(lambda: 3) == 3  # over: the asker does it

    def test_an_error_of_the_work_is_raised_for_who_asks(self) -> None:
        def work() -> None:
            raise RunStopped("a sampler failed")

        thread = OwnThread("the thread", work, 5.0)
        thread.start()
        with pytest.raises(RunStopped, match="a sampler failed"):
            for _ in range(100):
                thread.ask(lambda: time.sleep(0.01))

    def test_a_wait_has_an_end_and_a_name(self) -> None:
        thread = OwnThread("the thread of the samplers", lambda: time.sleep(0.001), 0.1)
        thread.start()
        with pytest.raises(RunStopped, match=r"did not come to rest within 0.1 s: sampler 1 \(3\)"):
            thread.pause(lambda: False, lambda: "sampler 1 (3)")
        thread.stop()


def test_turns_of_many_samplers_are_longer_and_end_early_for_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that costs the driver 2 ms: of 4 samplers 4 x 2 / 0.2 = 40 ms, so 0.1 s; of 64 samplers 0.64 s."""
    length = TurnLength()
    assert length.of(1000) == 0.1  # nothing is known
    for _ in range(20):
        length.note(0.006, 3)
    assert length.of(4) == 0.1 and length.of(64) == pytest.approx(0.64) and length.of(100_000) == 30.0
    crew = Crew("a", "b")
    fleet, _ = fleet_of(crew)
    monkeypatch.setattr(fleet, "_length", length)
    monkeypatch.setattr(length, "of", lambda samplers: 7.0)
    late: list[Any] = []  # promises of turns that last
    monkeypatch.setattr(crew, "ready", lambda promises, timeout_s: [each for each in promises if each not in late])
    fleet.submit(requests("0/0", "0/1"))
    fleet._give_orders()
    late += [post.turn for post in fleet._posts]
    fleet.wait(1.0)
    assert not fleet.at_rest() and not fleet.at_rest()
    assert [one.hurried for one in crew.all] == [1, 1]  # once for a rest
    late.clear()
    while not fleet.at_rest():
        fleet.wait(1.0)
    assert [one.orders[0].timeout_s for one in crew.all] == [7.0, 7.0]
    fleet.go()
    fleet.wait(1.0)
    assert crew.all[0].orders[1].timeout_s == 7.0


def test_many_requests_are_shared_out_as_one_after_the_other_would_be() -> None:
    """Each goes to the first sampler with the fewest, also beside conversations that stay where they are."""
    crew = Crew("a", "b", "c")
    fleet, _ = fleet_of(crew)
    fleet.submit([Request("talk@0", (1,), 8, conversation="talk")])
    fleet.wait(1.0)
    names = [f"{number}/0" for number in range(5)]
    talks = [Request(f"talk@{turn}", (1,), 8, conversation="talk") for turn in (1, 2)]
    fleet.submit([*requests(*names[:1]), *talks, *requests(*names[1:])])
    fleet.wait(1.0)
    asked = [[each.sample_id for order in one.orders for each in order.new] for one in crew.all]
    assert asked == [["talk@0", "talk@1", "talk@2"], ["0/0", "2/0", "4/0"], ["1/0", "3/0"]]
