"""The ledger of groups by hand, and over random schedules on a simulated clock."""

from __future__ import annotations

import itertools
import random
from bisect import bisect_right as bisect
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.asynchrony.ledger import Bounds, Event, Ledger
from posttrain.asynchrony.pending import Entry
from posttrain.errors import RunStopped


def admitted(ledger: Ledger, count: int) -> list[int]:
    return [ledger.admit(f"p{ledger.admitted}", 1).serial for _ in range(count)]


def train(ledger: Ledger) -> list[int]:
    """One step on what the ledger chooses."""
    chosen = ledger.choice()
    assert chosen is not None
    serials = [entry.serial for entry in chosen]
    ledger.take(chosen, serials)
    ledger.end_step()
    return serials


def test_no_more_is_admitted_than_can_be_trained_in_time() -> None:
    """B = 2, S = 1: (1 + 1) x 2 = 4 groups; after a step of 2, two more."""
    ledger = Ledger(Bounds(groups_per_step=2, staleness=1, total_steps=9))
    admitted(ledger, 4)
    assert ledger.room() == 0
    with pytest.raises(ValueError, match="p4 cannot be trained within 1 steps"):
        ledger.admit("p4", 1)
    ledger.finish(3)
    ledger.finish(1)
    assert train(ledger) == [1, 3]
    assert ledger.room() == 2


def test_every_domain_has_room_of_its_own_and_its_share_of_a_step() -> None:
    """2 of a and 1 of b a step, S = 1: 4 of a and 2 of b. Two of a are finished: the step waits for one of b, though a third of
    a is finished, too. Then 2 of a and 1 of b have room again."""
    ledger = Ledger(Bounds(groups_per_step=3, staleness=1, total_steps=9, domains={"a": 2, "b": 1}))
    assert (ledger.room("a"), ledger.room("b"), ledger.room()) == (4, 2, 6)
    for domain in "aabaab":
        ledger.admit("p", 1, domain=domain)
    assert ledger.room() == 0
    with pytest.raises(ValueError, match="no room"):
        ledger.admit("p", 1, domain="b")
    for serial in (0, 3, 4):
        ledger.finish(serial)
    assert ledger.choice() is None
    ledger.finish(5)
    assert train(ledger) == [0, 3, 5]
    assert (ledger.room("a"), ledger.room("b")) == (2, 1)
    again = Ledger(ledger.bounds)
    again.restore(ledger.state())
    assert (again.room("a"), again.room("b")) == (2, 1)
    with pytest.raises(RunStopped, match=r"groups of the domain a, which this run has not"):
        Ledger(Bounds(groups_per_step=3, staleness=1, total_steps=9, domains={"b": 3})).restore(ledger.state())
    with pytest.raises(RunStopped, match=r"2 groups of a in the checkpoint cannot be trained in 1 steps of 1 groups"):
        Ledger(Bounds(groups_per_step=3, staleness=1, total_steps=9, domains={"a": 1, "b": 2})).restore(ledger.state())


def test_the_last_steps_admit_no_more_than_they_train() -> None:
    ledger = Ledger(Bounds(groups_per_step=2, staleness=3, total_steps=2))
    assert ledger.room() == 4
    admitted(ledger, 4)
    for serial in range(4):
        ledger.finish(serial)
    train(ledger)
    train(ledger)
    assert ledger.room() == 0  # samplers that work apart go on for a moment after the last step


def test_weights_of_some_steps_before_leave_less_room() -> None:
    """B = 2, S = 2, new weights after every other step. A group that starts a step after the last sync is as old as that, and due
    a step earlier: (2 + 1 - 1) x 2 = 4 groups."""
    ledger = Ledger(Bounds(groups_per_step=2, staleness=2, total_steps=9))
    admitted(ledger, 6)
    for serial in range(6):
        ledger.finish(serial)
    chosen = ledger.choice()
    assert chosen is not None
    ledger.take(chosen, [0, 1])
    ledger.end_step(synced=False)
    assert (ledger.steps, ledger.synced, ledger.room()) == (1, 0, 0)
    assert train(ledger) == [2, 3]  # synced
    assert ledger.room() == 4 and ledger.admit("p", 1).started == 2


def test_a_resumed_run_records_again_what_came_after_its_checkpoint() -> None:
    events: list[Event] = []
    ledger = Ledger(Bounds(groups_per_step=1, staleness=1, total_steps=9))
    admitted(ledger, 2)
    ledger.finish(0)
    train(ledger)
    admitted(ledger, 1)
    ledger.finish(2)
    again = Ledger(ledger.bounds, events.append)
    again.restore(ledger.state())
    again.record_again()
    assert [(event["step"], event["event"], event["group"]) for event in events] == [
        (2, "admitted", 2),
        (2, "finished", 2),
    ]


def test_groups_sampled_at_a_time_have_a_limit_of_their_own() -> None:
    ledger = Ledger(Bounds(groups_per_step=2, staleness=3, total_steps=9, max_running=3))
    admitted(ledger, 3)
    assert ledger.room() == 0
    ledger.finish(0)
    assert ledger.room() == 1


def test_a_step_waits_for_the_group_that_is_due() -> None:
    """S = 1: groups 0 to 3 start with the first weights. Step 1 takes 1 and 2; step 2 must take 0 and 3, although 4 and 5 are
    finished."""
    ledger = Ledger(Bounds(groups_per_step=2, staleness=1, total_steps=9))
    admitted(ledger, 4)
    ledger.finish(1)
    assert ledger.choice() is None and ledger.awaited() == []  # too few are finished
    ledger.finish(2)
    assert train(ledger) == [1, 2]
    admitted(ledger, 2)
    for serial in (3, 4, 5):
        ledger.finish(serial)
    assert ledger.choice() is None
    assert [entry.serial for entry in ledger.awaited()] == [0]
    ledger.finish(0)
    assert train(ledger) == [0, 3]


def test_a_step_waits_early_where_too_many_would_be_due_at_once() -> None:
    """S = 1, B = 2, one group of the first weights trained in step 1 beside one of none: three would be due in step 2, which
    takes two. That cannot happen: room and choice together keep it from coming."""
    ledger = Ledger(Bounds(groups_per_step=2, staleness=1, total_steps=9))
    admitted(ledger, 4)
    ledger.finish(0)
    ledger.finish(1)
    train(ledger)
    admitted(ledger, 2)
    ledger.finish(4)
    ledger.finish(2)
    assert [entry.serial for entry in ledger.awaited()] == [3]


def test_drop_takes_what_is_finished_and_drops_what_is_past_its_bound() -> None:
    events: list[Event] = []
    ledger = Ledger(Bounds(groups_per_step=1, staleness=0, total_steps=9, on_stale="drop"), events.append)
    admitted(ledger, 1)
    ledger.finish(0)
    assert train(ledger) == [0]
    wide = Ledger(Bounds(groups_per_step=1, staleness=1, total_steps=9, on_stale="drop"), events.append)
    admitted(wide, 2)
    wide.finish(1)
    assert train(wide) == [1]
    admitted(wide, 1)
    wide.finish(2)
    chosen = wide.choice()
    assert chosen is not None
    wide.take(chosen, [2])
    assert [entry.serial for entry in wide.end_step()] == [0]
    assert events[-1] == {"step": 2, "event": "dropped", "group": 0, "prompt_id": "p0"}
    assert (wide.admitted, wide.trained, wide.dropped) == (3, 2, 1)


def test_a_group_that_is_filtered_makes_room_within_the_step() -> None:
    ledger = Ledger(Bounds(groups_per_step=2, staleness=0, total_steps=9))
    admitted(ledger, 2)
    ledger.finish(0)
    ledger.finish(1)
    chosen = ledger.choice()
    assert chosen is not None and ledger.room() == 0
    ledger.take(chosen, [1])
    assert ledger.room() == 1 and ledger.choice() is None
    admitted(ledger, 1)
    ledger.finish(2)
    assert [entry.serial for entry in ledger.choice() or ()] == [2]


def test_a_resumed_ledger_is_the_same_and_refuses_a_bound_it_cannot_meet() -> None:
    ledger = Ledger(Bounds(groups_per_step=2, staleness=2, total_steps=9))
    admitted(ledger, 6)
    for serial in (1, 2):
        ledger.finish(serial)
    train(ledger)
    again = Ledger(ledger.bounds)
    again.restore(ledger.state())
    assert again.state() == ledger.state() and again.room() == ledger.room() == 2
    with pytest.raises(RunStopped, match=r"4 groups in the checkpoint cannot be trained in 1 steps of 2 groups"):
        Ledger(Bounds(groups_per_step=2, staleness=1, total_steps=9)).restore(ledger.state())


def test_a_fraction_of_a_step_may_be_older() -> None:
    """ROLL's async_generation_ratio 0.5 with 4 prompts: 4 + 2 are started, and 2 of step 2 are a step old."""
    bounds = Bounds.of(0.5, groups_per_step=4, total_steps=9)
    assert (bounds.staleness, bounds.oldest_per_step) == (1, 2)
    ledger = Ledger(bounds)
    assert ledger.room() == 6
    assert Bounds.of(0.2, groups_per_step=4, total_steps=9).staleness == 0  # less than a group
    # As written: 5 * (1.2 % 1) is 0.9999999999999998 and 10 * (2.3 % 1) is 2.9999999999999982 in binary fractions.
    assert [
        (each.staleness, each.oldest_per_step)
        for each in (
            Bounds.of(1.2, groups_per_step=5, total_steps=9),
            Bounds.of(2.3, groups_per_step=10, total_steps=9),
        )
    ] == [(2, 1), (3, 3)]
    assert Bounds.of(2.0, groups_per_step=4, total_steps=9) == Bounds(groups_per_step=4, staleness=2, total_steps=9)


@pytest.mark.parametrize("ratio", [0.5, 1.25, 1.5, 2.75])
def test_the_fraction_holds_over_a_thousand_steps(ratio: float) -> None:
    """I14, and I1: of every step at most the fraction has the full staleness, and some do."""
    bounds = Bounds.of(ratio, groups_per_step=4, total_steps=1000)
    simulation = Simulation(bounds, seed=3)
    simulation.run()
    oldest = Counter(
        event["step"]
        for event in simulation.log
        if event["event"] == "consumed" and event["staleness"] == bounds.staleness
    )
    assert 0 < max(oldest.values()) <= int(4 * (ratio % 1))


def test_a_group_is_trained_once() -> None:
    ledger = Ledger(Bounds(groups_per_step=1, staleness=1, total_steps=9))
    admitted(ledger, 2)
    ledger.finish(0)
    with pytest.raises(ValueError, match="group 0 is not being sampled"):
        ledger.finish(0)
    train(ledger)
    with pytest.raises(ValueError, match="group 0 is not being sampled"):
        ledger.finish(0)


class Simulation:
    """A run on a simulated clock: sampling, validation, slow rewards, filters and kills, with a ledger that is checked at every
    event. Group durations are log-normal, so that a few take many steps. Samplers get new weights after every ``every`` steps, as
    far as the bound allows, and now and then within a step; with ``apart`` they go on while it trains. Groups that a filter
    rejects are made up for, or not (``fewer``)."""

    def __init__(
        self,
        bounds: Bounds,
        seed: int,
        *,
        passing: float = 1.0,
        kill_every: float = 0.0,
        every: int = 1,
        apart: bool = False,
        fewer: bool = False,
    ):
        self.bounds = bounds
        self.apart, self.fewer = apart, fewer
        self.every = min(every, bounds.staleness + (bounds.oldest_per_step is None))
        self.log: list[Event] = []
        self.events = self.kills = 0
        self.durations: dict[int, float] = {}  # by group
        self._oldest = Counter[int]()
        self._passing = passing
        self._kill = kill_every
        self._random = random.Random(seed)
        self._now = 0.0
        self._ends: dict[int, float] = {}  # of groups that are being sampled
        self._ledger = self._new()
        self._redraw: list[tuple[str, str]] = []  # prompts and domains
        self._domains: dict[int, str] = {}  # of groups

    def _new(self) -> Ledger:
        return Ledger(self.bounds, self._record)

    def _record(self, event: Event) -> None:
        self.log.append(event)
        self.events += 1
        if event["event"] == "consumed":
            assert 0 <= event["staleness"] <= self.bounds.staleness  # I1
            if self.bounds.oldest_per_step is not None and event["staleness"] == self.bounds.staleness:
                self._oldest[event["step"]] += 1
                assert self._oldest[event["step"]] <= self.bounds.oldest_per_step

    def run(self) -> None:
        while self._ledger.steps < self.bounds.total_steps:
            saved: tuple[Any, ...] = (self._ledger.state(), dict(self._ends), list(self._redraw), self._now)
            if self._random.random() < self._kill:
                self.kills += 1
                self._step(dies_after=self._random.randrange(12))
                self._ledger = self._new()
                self._ledger.restore(saved[0])
                self._ends, self._redraw, self._now = saved[1], saved[2], saved[3]
                # A resumed run drops the lines of the step that it makes again.
                self.log = [event for event in self.log if event["step"] <= self._ledger.steps]
                self._oldest.pop(self._ledger.steps + 1, None)
                self._check_no_burst()
            self._step()
        ledger = self._ledger
        assert ledger.admitted == ledger.trained + ledger.filtered + ledger.dropped + len(ledger.pending)
        self._check_log()

    def _step(self, dies_after: int | None = None) -> None:
        ledger, complete = self._ledger, False
        kept = Counter[str]()  # by domain
        self._now += self._random.choice([0.0, 0.0, 3.0])  # a validation, or a slow reward
        while not complete:
            if self.every > 1 and self._random.random() < 0.1:
                ledger.sync()  # a sampler has joined
            self._fill()
            chosen = ledger.choice()
            if chosen is None:
                assert self._ends, "nothing is being sampled, and the step waits"  # I10
                serial = min(self._ends, key=lambda each: (self._ends[each], each))
                self._now = max(self._now, self._ends.pop(serial))
                ledger.finish(serial)
                if dies_after is not None:
                    dies_after -= 1
                    if dies_after < 0:
                        return
                continue
            passing = [entry.serial for entry in chosen if self._random.random() < self._passing]
            kept.update(entry.domain for entry in chosen if entry.serial in passing)
            wanting = [name for name, share in self.bounds.shares.items() if kept[name] < share]
            if self.fewer:  # a domain is content with what its first groups have left
                wanting = [name for name in wanting if not kept[name]]
            complete = not wanting
            ledger.take(chosen, passing, wanting)
        if self.apart:
            self._fill()
        if dies_after is not None:
            return
        for entry in ledger.end_step(synced=(ledger.steps + 1) % self.every == 0):
            self._ends.pop(entry.serial, None)
            if entry.attempt == 0:
                self._redraw.append((entry.prompt_id, entry.domain))
        self._now += 1.0  # training

    def _fill(self) -> None:
        """Admit what there is room for."""
        while self._ledger.room():
            entry = self._admit()
            self.durations[entry.serial] = self._random.lognormvariate(0, 1.5)
            self._ends[entry.serial] = self._now + self.durations[entry.serial]
        self._check_no_burst()

    def _admit(self) -> Entry:
        ledger = self._ledger
        again = next((each for each in self._redraw if ledger.room(each[1])), None)
        if again:
            self._redraw.remove(again)
            return ledger.admit(again[0], 0, attempt=1, domain=again[1])
        domain = self._random.choice([each for each in self.bounds.shares if ledger.room(each)])
        self._domains[ledger.admitted] = domain
        return ledger.admit(f"p{ledger.admitted}", 1, domain=domain)

    def _check_no_burst(self) -> None:
        """I11, and the bound of admission at any time."""
        pending = Counter(entry.domain for entry in self._ledger.pending)
        for domain, groups in self.bounds.shares.items():
            assert pending[domain] <= groups + self.bounds.within(self.bounds.staleness, domain)
        if self.bounds.max_running is not None:
            assert len(self._ledger.running) <= self.bounds.max_running

    def _check_log(self) -> None:
        """I2: what was admitted was trained, filtered or dropped, each once, or is pending; a run of ``wait`` leaves nothing."""
        count: Callable[[str], Counter[int]] = lambda *words: Counter(  # noqa: E731
            event["group"] for event in self.log if event["event"] in words
        )
        gone = count("consumed", "filtered", "dropped")
        pending = Counter(entry.serial for entry in self._ledger.pending)
        assert gone + pending == count("admitted")
        assert max(count("admitted").values()) == 1
        if self.bounds.on_stale == "wait":
            assert not count("dropped") and not pending
        consumed = [event for event in self.log if event["event"] == "consumed"]
        of_step = Counter(event["step"] for event in consumed)
        assert of_step.keys() == set(range(1, self.bounds.total_steps + 1))
        assert max(of_step.values()) <= self.bounds.groups_per_step
        if self.fewer:
            return
        assert min(of_step.values()) == self.bounds.groups_per_step
        if self.bounds.domains and self.bounds.on_stale == "wait":
            of_steps = Counter((event["step"], self._domains[event["group"]]) for event in consumed)
            assert of_steps == {
                (step, domain): groups
                for step in range(1, self.bounds.total_steps + 1)
                for domain, groups in self.bounds.domains.items()
            }


BOUNDS = st.builds(
    Bounds,
    groups_per_step=st.integers(1, 5),
    staleness=st.integers(0, 4),
    total_steps=st.integers(1, 12),
    max_running=st.none() | st.integers(1, 12),
    on_stale=st.sampled_from(["wait", "drop"]),
)
FRACTIONS = st.builds(
    Bounds.of,
    st.sampled_from([0.25, 0.5, 1.5, 2.75, 3.9]),
    groups_per_step=st.integers(1, 6),
    total_steps=st.integers(1, 12),
    max_running=st.none() | st.integers(1, 12),
)


DOMAINS = st.builds(
    lambda parts, staleness, steps, running, on_stale: Bounds.of(
        staleness,
        groups_per_step=sum(parts),
        total_steps=steps,
        max_running=running,
        on_stale=on_stale if staleness % 1 == 0 else "wait",
        domains={f"d{number}": part for number, part in enumerate(parts)},
    ),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 3.9]),
    st.integers(1, 10),
    st.none() | st.integers(1, 12),
    st.sampled_from(["wait", "drop"]),
)


@settings(max_examples=250, deadline=None)
@given(
    bounds=BOUNDS | FRACTIONS | DOMAINS,
    seed=st.integers(0, 10**6),
    passing=st.sampled_from([1.0, 0.5]),
    kill=st.sampled_from([0.0, 0.4]),
    every=st.integers(1, 5),
    apart=st.booleans(),
    fewer=st.booleans(),
)
def test_every_schedule_keeps_the_bound_and_loses_nothing(
    bounds: Bounds, seed: int, passing: float, kill: float, every: int, apart: bool, fewer: bool
) -> None:
    simulation = Simulation(bounds, seed, passing=passing, kill_every=kill, every=every, apart=apart, fewer=fewer)
    simulation.run()


def test_no_small_schedule_stands_still() -> None:
    """All B, S and limits up to 3, and all orders in which up to four groups in flight may end first."""
    for size, staleness, limit, order in itertools.product(
        (1, 2, 3), (0, 1, 2), (1, 2, 3, None), itertools.permutations(range(3))
    ):
        ledger = Ledger(Bounds(groups_per_step=size, staleness=staleness, total_steps=4, max_running=limit))
        for _ in range(4):
            turn = 0
            while (chosen := ledger.choice()) is None:
                while ledger.room():
                    ledger.admit("p", 1)
                running = [entry.serial for entry in ledger.running]
                assert running
                ledger.finish(running[order[turn % 3] % len(running)])
                turn += 1
            ledger.take(chosen, [entry.serial for entry in chosen])
            ledger.end_step()
        assert not ledger.pending and ledger.trained == 4 * size


def test_waiting_trains_the_lengths_that_were_admitted_and_dropping_does_not() -> None:
    """I9: Kolmogorov-Smirnov between the durations of admitted and of trained groups; by hand, D = sup |F - G|, and p > 0.01
    for D < 1.63 sqrt((n + m) / (n m))."""
    distance = {}
    for on_stale in ("wait", "drop"):
        bounds = Bounds(groups_per_step=8, staleness=1, total_steps=120, on_stale=on_stale)  # type: ignore[arg-type]
        simulation = Simulation(bounds, seed=5)
        simulation.run()
        groups = {event["group"] for event in simulation.log if event["event"] == "consumed"}
        admitted, trained = sorted(simulation.durations.values()), sorted(simulation.durations[each] for each in groups)
        found = max(abs(bisect(admitted, x) / len(admitted) - bisect(trained, x) / len(trained)) for x in admitted)
        distance[on_stale] = found / (1.63 * ((1 / len(admitted) + 1 / len(trained)) ** 0.5))
    assert distance["wait"] < 1 < distance["drop"]


def test_two_hundred_kills_lose_nothing() -> None:
    """I2: at any event of any step."""
    kills = 0
    for seed in range(40):
        bounds = Bounds(groups_per_step=3, staleness=seed % 4, total_steps=12, on_stale=("wait", "drop")[seed % 2])  # type: ignore[arg-type]
        simulation = Simulation(bounds, seed, kill_every=0.6)
        simulation.run()
        kills += simulation.kills
    assert kills >= 200


@pytest.mark.slow
def test_a_million_events() -> None:
    events, numbers = 0, random.Random(0)
    while events < 10**6:
        bounds = Bounds(
            groups_per_step=numbers.randint(1, 32),
            staleness=numbers.randint(0, 8),
            total_steps=200,
            max_running=numbers.choice([None, numbers.randint(1, 64)]),
            on_stale=numbers.choice(["wait", "drop"]),
        )
        simulation = Simulation(
            bounds,
            numbers.randrange(10**9),
            passing=numbers.choice([1.0, 0.6]),
            kill_every=0.2,
            every=numbers.randint(1, 4),
            apart=numbers.random() < 0.5,
            fewer=numbers.random() < 0.2,
        )
        simulation.run()
        events += simulation.events


def awaited_by_looking_at_all(ledger: Ledger, missing: dict[str, int]) -> list[int]:
    """The rule as the module states it: for every due step, groups due by it that the step under way does not take."""
    bounds, running = ledger.bounds, {entry.serial for entry in ledger.running}
    found = []
    for domain, wanted in missing.items():
        own = [entry for entry in ledger.pending if entry.domain == domain]
        finished = [entry for entry in own if entry.serial not in running]
        if len(finished) < wanted:
            continue
        for ahead in range(bounds.staleness + 1):
            due = ledger.steps - bounds.staleness + ahead
            must = [entry for entry in own if entry.started <= due]
            within = sum(entry.started <= due for entry in finished[:wanted])
            if len(must) - within > bounds.within(ahead, domain):
                found += [entry.serial for entry in must if entry.serial in running]
                break
    return sorted(found)


@pytest.mark.parametrize("domains", [{}, {"a": 2, "b": 1}], ids=["alike", "domains"])
@pytest.mark.parametrize("recorded", [False, True], ids=["admitted", "admitted again"])
def test_groups_that_a_step_waits_for_are_those_of_the_rule(domains: dict[str, int], recorded: bool) -> None:
    """Random schedules, also of a replay, which may admit older groups after newer ones."""
    draw, waits = random.Random(len(domains) + recorded), 0
    for _ in range(40):
        ledger = Ledger(Bounds(groups_per_step=3, staleness=draw.randint(0, 3), total_steps=30, domains=domains))
        missing = dict(ledger.bounds.shares)
        for _ in range(120):
            domain = draw.choice(list(missing))
            if ledger.room(domain):
                oldest = max(ledger.steps - ledger.bounds.staleness, 0)
                started = draw.randint(oldest, ledger.synced) if recorded and ledger.synced >= oldest else None
                ledger.admit("p", 1, domain=domain, check=False, started=started)
            if ledger.running and draw.random() < 0.7:
                ledger.finish(draw.choice([entry.serial for entry in ledger.running]))
            assert [entry.serial for entry in ledger.awaited()] == awaited_by_looking_at_all(ledger, missing)
            waits += bool(ledger.awaited())
            if chosen := ledger.choice():
                kept = [entry.serial for entry in chosen if draw.random() < 0.8]
                ledger.take(chosen, kept)
                for entry in chosen:
                    missing[entry.domain] -= entry.serial in kept
                assert [entry.serial for entry in ledger.awaited()] == awaited_by_looking_at_all(ledger, missing)
            if not any(missing.values()) and not (ledger.outdated and ledger.bounds.on_stale == "wait"):
                ledger.end_step(synced=draw.random() < 0.7)
                missing = dict(ledger.bounds.shares)
    assert waits > 50
