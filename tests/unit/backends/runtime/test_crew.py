"""A crew whose samplers are lost all at once: the way of the weights waits for those that are started in their place."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.backends.runtime.ray.crew import RayCrew
from posttrain.errors import RunStopped
from posttrain.interfaces.rollout_engine import Served
from posttrain.records.notices import Notices


@dataclass(eq=False)
class Sampler:
    name: str
    trouble: str | None = None
    vital: bool = False

    def lost(self) -> RunStopped:
        return RunStopped(f"{self.name} {self.trouble}")


def crew_of(members: list[Sampler], renew: Callable[[Any], Any]) -> RayCrew:
    def send(present: Sequence[Sampler], version: int) -> Served:
        assert all(each.trouble is None for each in present)
        return Served(version, "hash", 8)

    rollout: Any = SimpleNamespace(workers=SimpleNamespace(members=members), weights_changed=lambda version: None)
    sync: Any = SimpleNamespace(send=send)
    return RayCrew(rollout, sync, renew, Notices(), resumes=True, start_timeout_s=5.0)


def test_the_weights_wait_for_new_samplers_where_all_were_found_dead_meanwhile() -> None:
    """The watch has found them dead, and the thread that gives their groups away has not looked yet."""
    members = [Sampler("rollout rank 0", "is dead"), Sampler("rollout rank 1", "is dead")]
    crew = crew_of(members, lambda lost: Sampler(lost.name))
    policy: Any = SimpleNamespace(version=3)
    assert crew.publish(policy).version == 3
    assert members and all(each.trouble is None for each in members)


def test_a_sampler_joins_though_weights_were_sent_while_it_started() -> None:
    sent, go = threading.Event(), threading.Event()
    here, lost = Sampler("rollout rank 0"), Sampler("rollout rank 1", "is dead")
    members = [here, lost]

    def renew(member: Any) -> Sampler:
        go.set()
        sent.wait(5.0)
        return Sampler(member.name)

    crew = crew_of(members, renew)
    policy: Any = SimpleNamespace(version=3)
    crew.drop(lost)
    go.wait(5.0)
    crew.publish(policy)
    assert members == [here]
    sent.set()
    crew.wait_for_joiner()
    crew.publish(policy)
    assert [each.name for each in members] == ["rollout rank 0", "rollout rank 1"]


def test_one_that_is_dropped_twice_is_started_once() -> None:
    started: list[str] = []
    lost = Sampler("rollout rank 0", "is dead")

    def renew(member: Any) -> Sampler:
        started.append(member.name)
        return Sampler(member.name)

    crew = crew_of([lost], renew)
    crew.wait_for_joiner()
    crew.drop(lost)
    assert started == ["rollout rank 0"]
    assert crew.joiners == 1


def test_samplers_that_do_not_start_again_end_the_wait_with_the_reason() -> None:
    def fails(member: Any) -> Sampler:
        raise RunStopped("no memory left")

    crew = crew_of([Sampler("rollout rank 0", "is dead")], fails)
    with pytest.raises(RunStopped, match="no memory left"):
        crew.wait_for_joiner()


def test_a_start_that_fails_as_nobody_foresaw_is_told_and_others_are_still_started() -> None:
    started: list[str] = []

    def fails_once(member: Any) -> Sampler:
        started.append(member.name)
        if len(started) == 1:
            raise OSError("no file descriptor left")
        return Sampler(member.name)

    first, second = Sampler("rollout rank 0", "is dead"), Sampler("rollout rank 1", "is dead")
    crew = crew_of([first], fails_once)
    with pytest.raises(RunStopped, match=r"rollout rank 0: OSError\('no file descriptor left'\)"):
        crew.wait_for_joiner()
    crew.members().append(second)  # type: ignore[attr-defined]
    crew.wait_for_joiner()
    assert (started, crew.joiners) == (["rollout rank 0", "rollout rank 1"], 1)


def test_samplers_of_a_lost_machine_start_side_by_side() -> None:
    """Each start waits for the others: one after the other they would never end."""
    together = threading.Barrier(4, timeout=5.0)

    def renew(member: Any) -> Sampler:
        together.wait()
        return Sampler(member.name)

    members = [Sampler(f"rollout rank {number}", "is dead") for number in range(4)]
    crew = crew_of(members, renew)
    crew.wait_for_joiner()
    until = time.monotonic() + 10.0
    while crew.joiners < 4:
        assert time.monotonic() < until
        time.sleep(0.01)
    policy: Any = SimpleNamespace(version=1)
    crew.publish(policy)
    assert sorted(each.name for each in members) == [f"rollout rank {number}" for number in range(4)]
