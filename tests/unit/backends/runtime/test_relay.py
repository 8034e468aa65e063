"""Calls that a relay passes on end as calls by the driver do: with results, the name of who died, or the error of who failed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_cluster import FakeCluster, Promise
from posttrain.backends.runtime.ray.processes import WorkerProcess
from posttrain.backends.runtime.ray.worker import Failure
from posttrain.errors import ConfigError, Problem, RunStopped
from posttrain.records.notices import Notices

pytest.importorskip("ray")

from posttrain.backends.runtime.ray import relay as relay_module
from posttrain.backends.runtime.ray import watch as watch_module
from posttrain.backends.runtime.ray.cluster import KilledForMemory, WorkerDied
from posttrain.backends.runtime.ray.relay import Dead, Open, Relay
from posttrain.backends.runtime.ray.relays import RankRelay
from posttrain.backends.runtime.ray.shelf import Shelf
from posttrain.backends.runtime.ray.watch import Member, Watch
from posttrain.backends.runtime.ray.worker_group import WorkerGroup

BOOM = Failure(kind="", text="boom")
TOO_LARGE = Failure(kind="ConfigError", text="", problems=(Problem("too large"),))


def late() -> Promise:
    """An answer that comes after the test."""
    return Promise(0, 8.0)


class Ranks(FakeCluster):
    """Ranks whose answers are given by their names."""

    answers: dict[str, Promise]

    def call(self, handle: Any, method: str, *arguments: Any) -> Promise:
        if method not in ("call", "call_aside"):
            return super().call(handle, method, *arguments)
        self.asked.append((handle, method, *arguments))
        return self.answers[handle]

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Any, ...]] = []


def in_its_thread(relay: HereRelay, calls: Any) -> Promise:
    """Promise the relay's answers, which it works for meanwhile."""
    promise = Promise(None, 1e6)

    def work() -> None:
        promise.value = relay.pass_on(calls)
        promise.at = 0.0

    threading.Thread(target=work, daemon=True).start()
    return promise


class Relays(Ranks):
    """The driver's side, with relays that are called as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = 0
        self.dead: dict[str, Exception] = {}

    def call(self, handle: Any, method: str, *arguments: Any) -> Promise:
        self.messages += method != "news"
        if method == "pass_on":
            return Promise(self.dead[handle.name]) if handle.name in self.dead else in_its_thread(handle, *arguments)
        return super().call(handle.name if isinstance(handle, HereRelay) else handle, method, *arguments)


class HereRelay(Relay):
    """A relay without a process."""

    def __init__(self, name: str, handles: list[Any]):
        self.name = name
        self.take_ranks(handles)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """The ranks, as a relay calls them."""
    found = Ranks()
    monkeypatch.setattr(relay_module, "Calls", lambda: found)
    monkeypatch.setattr(relay_module, "SETTLE_S", 0.2)
    monkeypatch.setattr(relay_module, "LOOK_S", 0.05)
    return found


@pytest.fixture
def group(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[WorkerGroup]:
    """Four ranks with two relays."""
    for name, value in (("ROUND_S", 0.02), ("SILENCE_S", 0.1), ("SETTLE_S", 0.3)):
        monkeypatch.setattr(watch_module, name, value)
    cluster: Any = Relays()
    watch = Watch(cluster, Notices(), tmp_path / "logs", lambda line: None)

    def member(name: str, handle: Any) -> Member:
        found = Member(
            name=name, handle=handle, process=WorkerProcess(pid=1, started=0, node="here", host=name, log="")
        )
        watch.add(found)
        return found

    members = [member(f"trainer rank {rank}", f"r{rank}") for rank in range(4)]
    ranks.answers = {each.handle: Promise(each.name) for each in members}
    relays = []
    for number in (0, 1):
        own = tuple(members[2 * number : 2 * number + 2])
        here = HereRelay(f"relay{number}", [each.handle for each in own])
        relays.append(RankRelay(member(f"trainer relay {number}", here), own))
    watch.start()
    shelf: Any = Shelf(lambda value: value)
    yield WorkerGroup(cluster=cluster, watch=watch, members=members, timeout_s=5.0, shelf=shelf, relays=relays)
    watch.close()


def messages(group: WorkerGroup) -> int:
    cluster: Any = group.cluster
    return cluster.messages  # type: ignore[no-any-return]


def test_every_rank_is_asked_for_its_own_by_a_message_to_each_relay(group: WorkerGroup, ranks: Ranks) -> None:
    names = [f"trainer rank {rank}" for rank in range(4)]
    assert group.scatter("score", [(rank, "x") for rank in range(4)]) == names
    assert ranks.asked == [(f"r{rank}", "call", "score", True, rank, "x") for rank in range(4)]
    assert messages(group) == 2
    assert group.call("notes") == "trainer rank 0"
    assert [each[3] for each in ranks.asked[4:]] == [True, False, False, False]  # the result of one is wanted
    group.each_aside("write", "role")
    assert ranks.asked[-1] == ("r3", "call_aside", "write", "role") and messages(group) == 6


def test_few_ranks_are_called_by_the_driver(group: WorkerGroup, ranks: Ranks) -> None:
    cluster: Any = group.cluster
    cluster.answers = {"r0": Promise("first"), "r1": Promise("second")}
    assert group.scatter("version", [("policy",)]) == ["first"]
    assert group.scatter("reward", [(0,), (1,)]) == ["first", "second"]
    assert messages(group) == 3 and not ranks.asked


@pytest.mark.parametrize(
    ("died", "why"),
    [(WorkerDied("x"), "has died"), (KilledForMemory("x"), "was killed by Ray: its machine ran low on memory")],
)
def test_the_dead_is_named_while_its_neighbours_wait_for_it(
    group: WorkerGroup, ranks: Ranks, died: Exception, why: str
) -> None:
    ranks.answers |= {"r1": late(), "r2": late(), "r3": Promise(died, 0.1)}
    with pytest.raises(RunStopped, match=rf"^trainer rank 3 \(process 1 on trainer rank 3\) {why}"):
        group.call("update", what="policy update")


def test_who_lost_a_neighbour_is_not_named(group: WorkerGroup, ranks: Ranks) -> None:
    ranks.answers |= {"r2": Promise(BOOM), "r3": Promise(WorkerDied("x"), 0.1)}
    with pytest.raises(RunStopped, match=r"^trainer rank 3 .*has died"):
        group.call("update")


def test_an_error_is_raised_as_of_its_rank(group: WorkerGroup, ranks: Ranks) -> None:
    ranks.answers |= {"r0": late(), "r1": Promise(BOOM)}
    with pytest.raises(RuntimeError, match="trainer rank 1 failed:\nboom"):
        group.call("update")
    ranks.answers |= {"r1": Promise(TOO_LARGE)}
    with pytest.raises(ConfigError, match="too large"):
        group.call("begin")


def test_a_relay_that_dies_is_named(group: WorkerGroup) -> None:
    cluster: Any = group.cluster
    cluster.dead["relay1"] = WorkerDied("x")
    with pytest.raises(RunStopped, match=r"^trainer relay 1 .*has died"):
        group.call("update")


def test_a_deadline_names_all_who_are_late(group: WorkerGroup) -> None:
    promise = relay_module.PassedOn(late(), group.relays[0].member, group.relays[0].ranks)
    with pytest.raises(RunStopped, match=r"saving: no answer of trainer rank 0, trainer rank 1 within 0\.2 s"):
        group.watch.wait(dict.fromkeys(promise.members, promise), "saving", 0.2)


def test_answers_are_in_the_order_of_the_calls(ranks: Ranks) -> None:
    here = HereRelay("relay0", ["a", "b", "c"])
    ranks.answers = {"a": Promise("A", 0.15), "b": Promise("B"), "c": Promise("C", 0.1)}
    assert here.pass_on([(2, "call", ("x",)), (0, "call", ("x",))]) == ["C", "A"]
    ranks.answers |= {"a": late(), "b": Promise(WorkerDied("x"))}
    assert here.pass_on([(0, "call", ()), (1, "call", ())]) == [Open(), Dead("")]
