"""Asynchronous runs whose samplers work apart, on a tiny model: two samplers in threads, with copies of the weights."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crews import MortalCrew
from test_async_runs import (
    STEPS,
    assert_counts_hold,
    assert_each_group_is_trained_once,
    assert_shares,
    at_update,
    events,
    in_a_world,
    of_domains,
    ragged,
    read_again,
    results,
    without,
)
from test_runs import Make, PowerCut, comparable, maker, metrics_of

from posttrain.backends.rollout.native import NativeEngine
from posttrain.backends.runtime.inprocess import InProcess
from posttrain.build.train import train_run
from posttrain.errors import RequestError, RunInterrupted, RunStopped
from posttrain.interfaces.crew import Order
from posttrain.interfaces.roles import Roles
from posttrain.interfaces.rollout_engine import Served
from posttrain.interfaces.train_engine import TrainEngine
from posttrain.interfaces.weight_sync import check_served
from posttrain.interfaces.worlds import Worlds
from posttrain.models.weight_transfer import manifest_of
from posttrain.steps import fleet, posts
from posttrain.steps.apart import Apart
from posttrain.steps.episodes_in_flight import Episodes
from posttrain.steps.seat import StreamSeat

SEPARATE = {"mode": "separate", "max_staleness_steps": 2}


class Samplers:
    """A crew of copies of the policy's model, with hooks for tests."""

    def __init__(self, count: int, *, renews: bool = False, resumes: bool = True, echoes: bool = True):
        self.count, self.renews, self.resumes, self.echoes = count, renews, resumes, echoes
        self.crew: MortalCrew | None = None
        self.kills: Callable[[Order], bool] | None = None  # the first sampler that is given such an order dies
        self.orders: list[str] = []  # names of the samplers that were given an order

    def crew_of(self, roles: Roles) -> MortalCrew:
        model = roles.policy.model  # type: ignore[attr-defined]
        engines: dict[str, NativeEngine] = {}

        def seat(name: str) -> StreamSeat:
            engines[name] = NativeEngine(
                deepcopy(model).requires_grad_(False),
                roles.rollout.tokenizer,  # type: ignore[attr-defined]
                max_concurrent_sequences=4,
                max_prefill_tokens=300,
            )
            return StreamSeat(Noted(engines[name], lambda: self.orders.append(name)), resumes=self.resumes)

        def send(policy: TrainEngine) -> Served:
            manifest = manifest_of(model.named_parameters(), policy.version)
            assert self.crew is not None
            for engine in [engines[name] for name in self.crew.alive()]:
                for mine, theirs in zip(engine.model.parameters(), model.parameters(), strict=True):
                    mine.data.copy_(theirs.data)
                engine.weights_changed(policy.version)
            announced = Served(policy.version, manifest.content_hash)
            echoed = announced if self.echoes else Served(policy.version, "another")
            check_served(announced, [(self.crew.alive()[-1], echoed)])
            roles.rollout.weights_changed(policy.version)
            return announced

        seats = {f"sampler {number}": seat(f"sampler {number}") for number in range(self.count)}
        self.crew = MortalCrew(seats, send, resumes=self.resumes, renew=seat if self.renews else None, kills=self.kills)
        return self.crew


class Noted:
    """An engine whose streams are noted."""

    def __init__(self, engine: NativeEngine, note: Callable[[], None]):
        self.engine, self.note = engine, note

    def open_stream(self, *arguments: Any) -> Any:
        self.note()
        return self.engine.open_stream(*arguments)


@pytest.fixture
def samplers(monkeypatch: pytest.MonkeyPatch) -> Samplers:
    """Runs start with these samplers."""
    return with_samplers(monkeypatch, Samplers(2))


def with_samplers(patch: pytest.MonkeyPatch, samplers: Samplers) -> Samplers:
    start = InProcess.start

    def started(self: InProcess, *arguments: Any) -> Roles:
        roles = start(self, *arguments)
        return replace(roles, crew=samplers.crew_of(roles))

    patch.setattr(InProcess, "start", started)
    return samplers


@pytest.fixture
def make(tmp_path: Path, tiny_llama: Path) -> Make:
    return ragged(maker(tmp_path, tiny_llama))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """An undisturbed run. Do not write into it."""
    with pytest.MonkeyPatch.context() as patch:
        with_samplers(patch, Samplers(2))
        make = ragged(maker(tmp_path_factory.mktemp("apart"), tiny_llama))
        return train_run(make("apart", asynchronous=SEPARATE))


def test_each_group_is_trained_once_within_the_bound(straight: Path) -> None:
    """I1, I2, I8, and what it is for: groups of older weights. A token's version is one that its sampler had echoed (I12)."""
    log, lines = events(straight), metrics_of(straight)
    assert_each_group_is_trained_once(straight)
    assert Counter(event["step"] for event in log if event["event"] == "consumed") == dict.fromkeys(
        range(1, STEPS + 1), 2
    )
    assert max(line["async/staleness_steps_max"] for line in lines) in (1.0, 2.0)
    echoed = {(event["sampler"], event["version"]) for event in log if event["event"] == "weights"}
    assert {sampler for sampler, _ in echoed} == {0, 1}
    rows = [
        json.loads(line)
        for n in range(1, STEPS + 1)
        for line in (straight / f"samples/step_{n}.jsonl").read_text().splitlines()
    ]
    assert {row["policy_version"] for row in rows} <= {version for _, version in echoed}
    assert all(0 <= line["async/sampler_busy_share"] <= 1 and line["async/samplers"] == 2 for line in lines)


def test_a_replayed_run_is_equal(make: Make, samplers: Samplers, straight: Path) -> None:
    """I5: the same orders at the same passes of the same samplers."""
    again = train_run(make("again", asynchronous=SEPARATE), replay=straight)
    assert results(again) == results(straight)
    hidden = ("async/sampler_busy_share",)
    assert without(comparable(again), *hidden) == without(comparable(straight), *hidden)
    assert orders(again) == orders(straight)


@pytest.mark.slow
def test_kept_groups_are_trained_again_without_sampling(
    make: Make, samplers: Samplers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_again(make, tmp_path, monkeypatch, SEPARATE)


def test_a_replay_with_fewer_samplers_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch, straight: Path) -> None:
    with_samplers(monkeypatch, Samplers(1))
    fewer = make("fewer", asynchronous=SEPARATE)
    with pytest.raises(RunStopped, match="had 2 samplers at a time, and this one has 1"):
        train_run(fewer, replay=straight)
    assert not list(Path(str(fewer.run.folder)).glob("samples/*"))


@pytest.mark.slow
def test_validations_between_two_syncs_are_replayed(make: Make, samplers: Samplers) -> None:
    """A validation gives the samplers the present weights, so groups admitted after it are younger than those admitted before it;
    that of the last step lets them rest once more than the schedule says."""
    often = {"asynchronous": SEPARATE | {"sync_every_steps": 2}, "validation": {"every_steps": 1}}
    first = train_run(make("first", **often))
    again = train_run(make("again", **often), replay=first)
    assert results(again) == results(first)
    hidden = ("async/sampler_busy_share", "async/late_share")
    assert without(comparable(again), *hidden) == without(comparable(first), *hidden)


def orders(folder: Path) -> dict[int, list[tuple[Any, ...]]]:
    """What every sampler was told, in its order."""
    found: dict[int, list[tuple[Any, ...]]] = {}
    for event in events(folder):
        if "sampler" in event:
            told = tuple(json.dumps(event.get(name)) for name in ("event", "pass", "sent", "version", "hash"))
            found.setdefault(event["sampler"], []).append(told)
    return found


@pytest.mark.slow
def test_steps_have_the_shares_of_domains(make: Make, samplers: Samplers, tmp_path: Path) -> None:
    """Of each domain the groups that are complete first; a replay makes the same choices."""
    sections = of_domains(tmp_path, **SEPARATE)
    first = train_run(make("first", **sections))
    assert_shares(first)
    assert_each_group_is_trained_once(first)
    assert results(train_run(make("again", **sections), replay=first)) == results(first)


@pytest.mark.slow
def test_a_killed_sampler_gives_its_groups_away(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_llama: Path
) -> None:
    """I15: its groups go on elsewhere with the tokens it had reported; another joins with later weights. A replay, in which
    no sampler dies, is equal to the byte."""
    with monkeypatch.context() as patch:
        samplers = with_samplers(patch, Samplers(2, renews=True))
        for module in (fleet, posts):
            patch.setattr(module, "TURN_S", 0.004)  # most responses take several turns
        samplers.kills = lambda order: not order.new
        first = train_run(make("first", asynchronous=SEPARATE))
    log = events(first)
    assert_each_group_is_trained_once(first)
    [lost] = [event for event in log if event["event"] == "lost"]
    joined = [event for event in log if event["event"] == "joined"]
    assert [event["sampler"] for event in joined] == [0, 1, 2] and lost["pass"] > 0
    at = log.index(lost)
    held = {name for event in log[:at] for name in event.get("sent", []) if event.get("sampler") == lost["sampler"]}
    assert held & {
        name for event in log[at:] if event.get("sampler") != lost["sampler"] for name in event.get("sent", [])
    }
    assert max(line["async/lost_samplers"] for line in metrics_of(first)) == 1
    with monkeypatch.context() as patch:
        with_samplers(patch, Samplers(2, renews=True))
        again = train_run(make("again", asynchronous=SEPARATE), replay=first)
    assert results(again) == results(first)


@pytest.mark.slow
def test_a_run_whose_samplers_all_die_waits_for_another(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that joins gets the trainer's present weights, also in a replay; without any the run stops and says so."""
    with monkeypatch.context() as patch:
        samplers = with_samplers(patch, Samplers(1, renews=True))
        kill_in_step(patch, samplers, 2)
        one = train_run(make("one", asynchronous=SEPARATE))
    assert_each_group_is_trained_once(one)
    with monkeypatch.context() as patch:
        with_samplers(patch, Samplers(1, renews=True))
        assert results(train_run(make("again", asynchronous=SEPARATE), replay=one)) == results(one)
    with monkeypatch.context() as patch:
        samplers = with_samplers(patch, Samplers(1))
        kill_in_step(patch, samplers, 2)
        with pytest.raises(RunStopped, match="no sampler is left"):
            train_run(make("none", asynchronous=SEPARATE))


@pytest.mark.slow
@pytest.mark.parametrize("late", ["first", "again"])
def test_episodes_of_a_sampler_that_died_are_replayed(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, late: str
) -> None:
    """The one that joins does so at the recorded choice, whether answers come sooner or later than in the recorded run."""
    runs: list[Path] = []
    for name in ("first", "again"):
        with monkeypatch.context() as patch:
            samplers = with_samplers(patch, Samplers(1, renews=True))
            if name == late:
                with_late_answers(patch)
            if name == "first":
                kill_in_step(patch, samplers, 2)
            settings = {"asynchronous": SEPARATE | {"wait_timeout_s": 60.0}}
            runs.append(in_a_world(make, tmp_path, name, workers=12, replay=runs[0] if runs else None, **settings))
    first, again = runs
    assert_each_group_is_trained_once(first)
    assert [event["sampler"] for event in events(first) if event["event"] == "joined"] == [0, 1]
    assert results(again) == results(first)


def kill_in_step(patch: pytest.MonkeyPatch, samplers: Samplers, step: int) -> None:
    sample = Apart.sample

    def with_a_loss(self: Apart, number: int, *more: Any) -> Any:
        if number == step:
            assert samplers.crew is not None
            samplers.crew.kill(0)
        return sample(self, number, *more)

    patch.setattr(Apart, "sample", with_a_loss)


@pytest.mark.slow
def test_a_run_that_died_resumes_without_loss(make: Make, samplers: Samplers, monkeypatch: pytest.MonkeyPatch) -> None:
    """I2 and I11: groups and prefixes of the checkpoint go on, each is trained once, and a resumed run is not replayed."""
    with monkeypatch.context() as patch:
        at_update(patch, 4)
        with pytest.raises(PowerCut):
            train_run(make("died", asynchronous=SEPARATE))
    folder = Path(make("died").folder)
    saved = json.loads((folder / "checkpoints/global_step_2/ahead.json").read_text())
    assert saved["ledger"]["pending"], "nothing was sampled ahead: choose other lengths"
    train_run(make("died", asynchronous=SEPARATE))
    assert_each_group_is_trained_once(folder)
    assert max(line["async/staleness_steps_max"] for line in metrics_of(folder)) <= 2
    with pytest.raises(RequestError, match="was resumed before step 3, where its samplers were started again"):
        train_run(make("again", asynchronous=SEPARATE), replay=folder)


@pytest.mark.slow
def test_a_checkpoint_between_two_syncs_is_resumed_within_the_bound(
    make: Make, samplers: Samplers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Syncs after steps 2 and 4, S = 2, and a checkpoint after step 3, when the samplers are a step behind. The resumed run's get
    the weights of step 3 at once, which have made 6 updates; what was admitted before keeps its age."""
    mode = SEPARATE | {"sync_every_steps": 2}
    sections = {"asynchronous": mode, "checkpoint": {"every_steps": 1}, "validation": {"every_steps": None}}
    with monkeypatch.context() as patch:
        at_update(patch, 4)
        with pytest.raises(PowerCut):
            train_run(make("died", **sections))
    folder = Path(make("died", **sections).folder)
    saved = json.loads((folder / "checkpoints/global_step_3/ahead.json").read_text())["ledger"]
    assert saved["steps"] == 3 and {entry["started"] for entry in saved["pending"]} == {2}
    train_run(make("died", **sections))
    log = events(folder)
    assert_each_group_is_trained_once(folder)
    sent = [(event["step"], event["version"]) for event in log if event["event"] == "weights"]
    assert sent == [(1, 0), (1, 0), (2, 4), (2, 4), (4, 6), (4, 6), (4, 8), (4, 8)]
    consumed = {event["group"]: event["staleness"] for event in log if event["event"] == "consumed"}
    assert max(consumed.values()) <= 2
    assert {consumed[entry["serial"]] for entry in saved["pending"]} == {1}  # trained in step 4, admitted with step 2
    echoed = {version for _, version in sent}
    assert {span for line in samples_of(folder) for span in versions_of(line)} <= echoed


def samples_of(folder: Path) -> list[dict[str, Any]]:
    files = [folder / f"samples/step_{step}.jsonl" for step in range(1, STEPS + 1)]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def versions_of(sample: dict[str, Any]) -> set[int]:
    return {span["version"] for span in sample.get("version_spans") or ()} or {sample["policy_version"]}


@pytest.mark.slow
def test_a_signal_saves_what_was_sampled_ahead(make: Make, samplers: Samplers, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Apart._wait_for_groups

    def with_a_signal(self: Apart, number: int, *more: Any) -> Any:
        if number == 3:
            signal.raise_signal(signal.SIGTERM)
        return wait(self, number, *more)

    with monkeypatch.context() as patch:
        patch.setattr(Apart, "_wait_for_groups", with_a_signal)
        with pytest.raises(RunInterrupted):
            train_run(make("stopped", asynchronous=SEPARATE))
    assert_each_group_is_trained_once(train_run(make("stopped", asynchronous=SEPARATE)))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"sync_every_steps": 2}, {"max_staleness_steps": 0}, {"on_stale": "drop"}])
def test_other_bounds(make: Make, samplers: Samplers, changes: dict[str, Any]) -> None:
    """I1 with weights that are handed over every other step, without any staleness, and with drops."""
    asked = SEPARATE | changes
    folder = train_run(make("run", asynchronous=asked))
    log = events(folder)
    assert_counts_hold(log)
    assert max(line["async/staleness_steps_max"] for line in metrics_of(folder)) <= asked["max_staleness_steps"]
    if "sync_every_steps" in changes:
        # Steps 2 and 4, and the validation after step 3.
        assert {event["step"] for event in log if event["event"] == "weights"} == {1, 2, 4}


@pytest.mark.slow
def test_responses_that_cannot_be_continued_end_first(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every response is of one version, and every group is trained once."""
    with_samplers(monkeypatch, Samplers(2, resumes=False))
    folder = train_run(make("run", asynchronous=SEPARATE))
    assert_each_group_is_trained_once(folder)
    rows = [
        json.loads(line)
        for n in range(1, STEPS + 1)
        for line in (folder / f"samples/step_{n}.jsonl").read_text().splitlines()
    ]
    assert not any(row.get("version_spans") for row in rows)


@pytest.mark.slow
def test_episodes_go_on_while_a_step_trains(make: Make, samplers: Samplers, tmp_path: Path) -> None:
    folder = in_a_world(make, tmp_path, "world", workers=12, seconds=0.01, asynchronous=SEPARATE)
    assert_each_group_is_trained_once(folder)
    again = in_a_world(make, tmp_path, "again", workers=12, seconds=0.0, asynchronous=SEPARATE, replay=folder)
    assert results(again) == results(folder)


class Late:
    """A host whose answers are held back until all samplers have done all that they can without them, and the loop has looked at
    that twice: the latest that a replay can get them."""

    def __init__(self, host: Any):
        self.host = host
        self.held: list[Any] = []
        self.looks = 0  # while no sampler had anything to do

    def __getattr__(self, name: str) -> Any:
        return getattr(self.host, name)

    def wait(self, timeout_s: float) -> list[Any]:
        self.held += self.host.wait(timeout_s)
        if self.looks < 3:
            return []
        self.looks, held, self.held = 0, self.held, []
        return held

    def look(self, posts: list[fleet.Post]) -> None:
        self.looks = 0 if any(post.turn is not None for post in posts) else self.looks + 1


def with_late_answers(patch: pytest.MonkeyPatch) -> None:
    begin, choice, at_rest = Episodes.__init__, Apart._choice, fleet.Fleet.at_rest
    hosts: list[Late] = []

    def begun(self: Episodes, worlds: Worlds, *more: Any, **named: Any) -> None:
        hosts.append(Late(worlds.host))
        begin(self, replace(worlds, host=hosts[-1]), *more, **named)

    def chosen(self: Apart) -> Any:
        hosts[-1].look(self._fleet._posts)
        return choice(self)

    def rests(self: fleet.Fleet) -> bool:
        hosts[-1].look(self._posts)
        return at_rest(self)

    patch.setattr(Episodes, "__init__", begun)
    patch.setattr(Apart, "_choice", chosen)
    patch.setattr(fleet.Fleet, "at_rest", rests)


@pytest.mark.slow
@pytest.mark.parametrize("bounds", [{"max_staleness_steps": 0}, {"max_staleness_steps": 1, "on_stale": "drop"}])
def test_a_replay_waits_for_answers_that_come_after_the_last_pass_of_a_step(
    make: Make, samplers: Samplers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bounds: dict[str, Any]
) -> None:
    """The rest that ends a step is not taken for one in which a sampler joins, although the step still waits for groups: without
    any staleness nothing is left to sample then."""
    settings = {"asynchronous": SEPARATE | bounds | {"wait_timeout_s": 60.0}}
    folder = in_a_world(make, tmp_path, "world", workers=12, **settings)
    with_late_answers(monkeypatch)
    again = in_a_world(make, tmp_path, "again", workers=12, replay=folder, **settings)
    assert results(again) == results(folder)


@pytest.mark.slow
def test_drops_between_two_syncs_are_replayed(make: Make, samplers: Samplers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Syncs after steps 2 and 4, S = 2: a group of step 1 that has not ended is dropped after step 3. Its requests are withdrawn
    at a recorded pass, although the samplers get no weights then."""
    mode = SEPARATE | {"sync_every_steps": 2, "on_stale": "drop", "wait_timeout_s": 60.0}
    with monkeypatch.context() as patch:
        with_a_slow_group(patch, 1)
        first = train_run(make("first", asynchronous=mode))
    log = events(first)
    assert_counts_hold(log)
    assert (3, 1) in {(event["step"], event["group"]) for event in log if event["event"] == "dropped"}
    assert {event["sampler"] for event in log if (event["step"], event["event"]) == (3, "rest")} == {0, 1}
    assert results(train_run(make("again", asynchronous=mode), replay=first)) == results(first)


def with_a_slow_group(patch: pytest.MonkeyPatch, serial: int) -> None:
    """Have a sampler of its own for a group, which makes a single pass."""
    left, turn = StreamSeat._left, StreamSeat.turn
    slow: set[StreamSeat] = set()

    def is_slow(request: Any) -> bool:
        return bool(request.sample_id.startswith(f"{serial}/"))

    def own_home(self: fleet.Fleet, request: Any, among: Any, *_: Any) -> fleet.Post:
        return among[1] if is_slow(request) else among[0]

    def turned(self: StreamSeat, order: Order) -> Any:
        if any(is_slow(request) for request in order.new):
            slow.add(self)
        return turn(self, order)

    def few_left(self: StreamSeat, order: Order) -> int | None:
        return max(1 - self._passes, 0) if self in slow else left(self, order)

    patch.setattr(fleet.Fleet, "_home", own_home)
    patch.setattr(StreamSeat, "turn", turned)
    patch.setattr(StreamSeat, "_left", few_left)


@pytest.mark.slow
def test_a_filter_that_refills(make: Make, samplers: Samplers) -> None:
    chosen = {"strategy": "refill", "above_std": 0.3, "max_batches": 50}
    folder = train_run(make("refill", asynchronous=SEPARATE, group_filter=chosen))
    log = events(folder)
    assert any(event["event"] == "filtered" for event in log)
    assert_counts_hold(log)
    assert results(train_run(make("again", asynchronous=SEPARATE, group_filter=chosen), replay=folder)) == results(
        folder
    )


def test_weights_that_a_sampler_does_not_echo_stop_the_run(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """I12: no token is sampled under weights that were not echoed."""
    samplers = with_samplers(monkeypatch, Samplers(2, echoes=False))
    with pytest.raises(RunStopped, match="sampler 1 serves weights of version 0"):
        train_run(make("run", asynchronous=SEPARATE))
    assert samplers.crew is not None and not samplers.orders
