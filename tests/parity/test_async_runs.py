"""Asynchronous runs on a tiny model: equal to the synchronous loop, to a reference of two plain loops, and to themselves."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_runs import REWARD, Make, PowerCut, comparable, maker, metrics_of, power_cut

from posttrain.backends.rollout.native.stream import NativeStream
from posttrain.build import train as build
from posttrain.build.train import train_run
from posttrain.errors import RequestError, RunInterrupted, RunStopped
from posttrain.loops import rl_sync
from posttrain.loops.rl_run import RlRun
from posttrain.run.clock import Clock
from posttrain.steps import episodes_in_flight
from posttrain.steps.ahead import Ahead
from posttrain.steps.assemble import assemble
from posttrain.steps.in_flight import Responses
from posttrain.steps.one_step import OneStepAhead
from posttrain.steps.rl_step import learn, sample_groups
from posttrain.steps.select import Selection

STEPS = 4
# Responses end at one of 32 of 259 tokens, so their lengths differ.
RAGGED = {"samples_per_prompt": 3, "max_response_tokens": 24, "stop_token_ids": list(range(0, 256, 8))}
CORRECTED = {"kl_coef": 0.01, "rollout_correction": {"weights": "token"}}
SECTIONS: dict[str, dict[str, Any]] = {
    "run": {"seed": 1, "total_steps": STEPS},
    "rollout": RAGGED,
    "loss": CORRECTED,
    "checkpoint": {"every_steps": 2},
    "validation": {"every_steps": 3, "before_training": False, "after_training": False},
}
ONE_STEP = {"mode": "one_step"}
COLOCATE = {"mode": "colocate", "max_staleness_steps": 2}

MakeRun = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path, tiny_llama: Path) -> Make:
    return ragged(maker(tmp_path, tiny_llama))


def ragged(make: Make) -> Make:
    def changed(folder: str, **changes: Any) -> Any:
        return make(folder, **(SECTIONS | changes))

    return changed


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """An undisturbed run of ``colocate``. Do not write into it."""
    make = ragged(maker(tmp_path_factory.mktemp("straight"), tiny_llama))
    return train_run(make("straight", asynchronous=COLOCATE))


def results(folder: Path) -> dict[str, bytes]:
    """Everything that must be equal in two runs that are the same."""
    final = folder / f"checkpoints/global_step_{STEPS}/policy"
    names = ("model.safetensors", "optimizer.safetensors", "engine.json")
    samples = {f"samples {n}": (folder / f"samples/step_{n}.jsonl").read_bytes() for n in range(1, STEPS + 1)}
    return {name: (final / name).read_bytes() for name in names} | samples


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "schedule.jsonl").read_text().splitlines()]


def assert_each_group_is_trained_once(folder: Path) -> None:
    found = events(folder)
    admitted = [event["group"] for event in found if event["event"] == "admitted"]
    gone = [event["group"] for event in found if event["event"] in ("consumed", "filtered", "dropped")]
    assert sorted(admitted) == sorted(gone) == list(range(len(admitted)))


def without(text: str, *prefixes: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in text.splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(prefixes)} for line in lines]


@pytest.mark.parametrize("strategy", ["none", "mask"])
def test_without_staleness_it_is_the_synchronous_loop(make: Make, strategy: str) -> None:
    """I3: S = 0, and whole batches."""
    chosen = {"group_filter": {"strategy": strategy, "above_std": 0.2}} if strategy != "none" else {}
    plain = train_run(make("plain", **chosen))
    ahead = train_run(make("ahead", asynchronous={"mode": "colocate", "max_staleness_steps": 0}, **chosen))
    assert results(ahead) == results(plain)
    hidden = ("async/", "step/sampled_tokens")
    assert without(comparable(ahead), *hidden) == without(comparable(plain), *hidden)
    assert {line["async/staleness_steps_max"] for line in metrics_of(ahead)} == {0.0}


def two_plain_loops(parts: RlRun) -> None:
    """A sampler's loop and a trainer's, hand in hand: batch n + 1 is sampled by the weights that step n starts with."""
    roles, plan = parts.roles, parts.plan
    clock = Clock(parts.run.trackers, 0)
    roles.weight_sync.publish(roles.policy, roles.rollout)
    batches = [sample_groups(roles, parts.scorer, parts.loader, plan.step_plan(1), clock)]
    for step in range(1, STEPS + 1):
        if step < STEPS:
            batches.append(sample_groups(roles, parts.scorer, parts.loader, plan.step_plan(step + 1), clock))
        scored = assemble(batches[step - 1].groups)
        learn(roles, scored, parts.rewards, plan.step_plan(step), clock)
    parts.run.checkpoints.save(STEPS, parts.progress)


def test_one_step_is_two_plain_loops(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """I4."""
    found = train_run(make("one_step", asynchronous=ONE_STEP))
    with monkeypatch.context() as patch:
        patch.setattr(build.rl_sync, "run", two_plain_loops)
        reference = train_run(make("reference"))
    for name in ("model.safetensors", "optimizer.safetensors"):
        path = f"checkpoints/global_step_{STEPS}/policy/{name}"
        assert (found / path).read_bytes() == (reference / path).read_bytes(), name
    stale = [line["async/staleness_steps_max"] for line in metrics_of(found)]
    assert stale == [0.0] + [1.0] * (STEPS - 1)
    assert_each_group_is_trained_once(found)
    versions = [
        json.loads((found / f"samples/step_{n}.jsonl").read_text().splitlines()[0])["policy_version"] for n in (2, 3)
    ]
    assert versions == [0, 2]  # two updates a step


def test_two_runs_that_cut_responses_are_equal(make: Make, straight: Path) -> None:
    """I6; and the run is what it is for: groups of older weights, and responses of several."""
    again = train_run(make("again", asynchronous=COLOCATE))
    assert results(again) == results(straight)
    assert comparable(again) == comparable(straight)
    assert (again / "schedule.jsonl").read_bytes() == (straight / "schedule.jsonl").read_bytes()
    lines = metrics_of(straight)
    assert max(line["async/staleness_steps_max"] for line in lines) == 2.0
    assert any(event["event"] == "cut" and event["token"] > 0 for event in events(straight))
    assert_each_group_is_trained_once(straight)
    consumed = Counter(event["step"] for event in events(straight) if event["event"] == "consumed")
    assert consumed == dict.fromkeys(range(1, STEPS + 1), 2)


def test_the_speed_of_sampling_counts_what_the_step_sampled(straight: Path) -> None:
    """Its groups may have been sampled before it: where all were, the speed is 0 and not beyond every machine's."""
    lines = metrics_of(straight)
    for line in lines:
        sampled = line["speed/rollout_tokens_per_s"] * line["time/rollout_s"]
        assert sampled == pytest.approx(line["step/sampled_tokens"])
    trained = sum(line["response/length_mean"] * 6 for line in lines)
    assert sum(line["step/sampled_tokens"] for line in lines) == pytest.approx(trained)


def test_trained_lengths_are_those_that_were_admitted(straight: Path) -> None:
    """I9 in the small: with wait, the samples trained are those of all groups that were admitted."""
    trained = Counter[str]()
    for step in range(1, STEPS + 1):
        for line in (straight / f"samples/step_{step}.jsonl").read_text().splitlines():
            trained[json.loads(line)["prompt_id"]] += 1
    admitted = Counter(event["prompt_id"] for event in events(straight) if event["event"] == "admitted")
    assert trained == Counter({name: 3 * count for name, count in admitted.items()})


@pytest.mark.slow
@pytest.mark.parametrize("mode", [ONE_STEP, COLOCATE])
@pytest.mark.parametrize("place", ["sampling", "training"])
def test_a_run_that_died_resumes_without_loss(
    make: Make, straight: Path, monkeypatch: pytest.MonkeyPatch, mode: dict[str, Any], place: str
) -> None:
    """I2 and I11: dead after the checkpoint of step 2, while the run samples or trains."""
    whole = straight if mode is COLOCATE else train_run(make("whole", asynchronous=mode))
    with monkeypatch.context() as patch:
        if place == "sampling":
            at_pass(patch, 3, 1)
        else:
            at_update(patch, 4)
        with pytest.raises(PowerCut):
            train_run(make("died", asynchronous=mode))
    folder = Path(make("died").folder)
    assert (
        not (folder / f"checkpoints/global_step_{STEPS}").exists() and (folder / "checkpoints/global_step_2").exists()
    )
    assert results(train_run(make("died", asynchronous=mode))) == results(whole)
    assert comparable(folder) == comparable(whole)
    assert (folder / "schedule.jsonl").read_bytes() == (whole / "schedule.jsonl").read_bytes()
    assert_each_group_is_trained_once(folder)


def test_a_signal_while_sampling_saves_the_step_before(
    make: Make, straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        at_pass(patch, 3, 2, lambda: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(RunInterrupted, match="which is made again when the run is started again"):
            train_run(make("stopped", asynchronous=COLOCATE))
    assert results(train_run(make("stopped", asynchronous=COLOCATE))) == results(straight)


def at_pass(patch: pytest.MonkeyPatch, step: int, number: int, act: Callable[[], object] = power_cut) -> None:
    """Do something at a pass of the sampler while a step samples."""
    seen = [0, 0]  # the step, and passes in it
    one_pass = NativeStream.step

    def counted(self: NativeStream) -> Any:
        seen[1] += 1
        if seen == [step, number]:
            act()
        return one_pass(self)

    def noted(sample: Callable[..., Selection]) -> Callable[..., Selection]:
        def with_number(self: Any, at: int, *more: Any) -> Selection:
            seen[:] = [at, 0]
            return sample(self, at, *more)

        return with_number

    patch.setattr(NativeStream, "step", counted)
    for sampler in (Ahead, OneStepAhead):
        patch.setattr(sampler, "sample", noted(sampler.sample))


def at_update(patch: pytest.MonkeyPatch, number: int) -> None:
    """Die after the updates of a step, before anything about it is written."""
    measure, seen = rl_sync.measure, []

    def counted(*args: Any) -> dict[str, float]:
        seen.append(1)
        if len(seen) == number:
            power_cut()
        return measure(*args)

    patch.setattr(rl_sync, "measure", counted)


@pytest.mark.slow
def test_drop_loses_what_it_logs_and_draws_its_prompt_again(make: Make) -> None:
    found = train_run(make("drop", asynchronous={"mode": "colocate", "max_staleness_steps": 1, "on_stale": "drop"}))
    log = events(found)
    dropped = [event for event in log if event["event"] == "dropped"]
    assert dropped, "the lengths of this run make no group late: choose others"
    assert_counts_hold(log)
    again = Counter(event["prompt_id"] for event in log if event["event"] == "admitted" and event["attempt"] == 1)
    firsts = Counter(
        event["prompt_id"]
        for event in dropped
        if next(e for e in log if e["event"] == "admitted" and e["group"] == event["group"])["attempt"] == 0
    )
    assert again - firsts == Counter()
    last = metrics_of(found)[-1]
    assert last["async/dropped_groups"] == len(dropped)


def assert_counts_hold(log: list[dict[str, Any]]) -> None:
    admitted = Counter(event["group"] for event in log if event["event"] == "admitted")
    gone = Counter(event["group"] for event in log if event["event"] in ("consumed", "filtered", "dropped"))
    assert gone <= admitted and max(gone.values()) == 1


def test_kept_groups_are_trained_again_without_sampling(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_again(make, tmp_path, monkeypatch, COLOCATE)


def read_again(make: Make, tmp_path: Path, patch: pytest.MonkeyPatch, mode: dict[str, Any]) -> None:
    """The second run, with other updates, has the responses of the first one: as a whole, since groups that are there at once are
    taken in another order. A group that is not there is sampled."""
    kept = tmp_path / "kept"
    settings = {"asynchronous": mode, "rollout": RAGGED | {"replay_folder": str(kept)}}
    first = train_run(make("first", **settings))
    groups = {f"group_{number}.jsonl" for number in range(1, 2 * STEPS + 1)}
    assert {path.name for path in kept.iterdir()} == groups
    begun: list[int] = []
    begin = Responses.begin
    patch.setattr(
        Responses, "begin", lambda self, place, *more: (begun.append(place.serial), begin(self, place, *more))
    )
    second = train_run(make("second", **settings, policy={"optimizer": {"lr": 1e-2}}))
    assert begun == [] and responses_of(second) == responses_of(first)
    assert all(line["step/sampled_tokens"] == 0 for line in metrics_of(second))
    (kept / "group_3.jsonl").unlink()
    train_run(make("third", **settings))
    assert begun == [2, 2, 2] and {path.name for path in kept.iterdir()} == groups
    other = {"asynchronous": mode, "rollout": settings["rollout"] | {"temperature": 0.5}}
    with pytest.raises(RunStopped, match=r"group_1\.jsonl does not fit this run: temperature was 1\.0, and is 0\.5"):
        train_run(make("other", **other))


def responses_of(folder: Path) -> list[str]:
    files = [folder / f"samples/step_{step}.jsonl" for step in range(1, STEPS + 1)]
    rows = [line for file in files for line in file.read_text().splitlines()]
    return sorted(f"{row['sample_id']} {row['response']}" for row in map(json.loads, rows))


@pytest.mark.slow
def test_a_filter_that_refills_works_ahead_of_training(make: Make) -> None:
    found = train_run(
        make(
            "refill",
            asynchronous=COLOCATE,
            group_filter={"strategy": "refill", "above_std": 0.3, "max_batches": 50},
        )
    )
    log = events(found)
    assert any(event["event"] == "filtered" for event in log)
    assert Counter(event["step"] for event in log if event["event"] == "consumed") == dict.fromkeys(
        range(1, STEPS + 1), 2
    )
    assert_counts_hold(log)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["refill", "replace", "drop"])
def test_a_filter_leaves_its_groups_in_the_records_of_one_step(
    make: Make, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """I2 from schedule.jsonl: every group that was sampled is trained or filtered, once, also by a run that died; a group that
    replaces others is one."""
    chosen = {"group_filter": {"strategy": strategy, "above_std": 0.3, "max_batches": 50}, "asynchronous": ONE_STEP}
    whole = train_run(make("whole", **chosen))
    with monkeypatch.context() as patch:
        at_update(patch, 4)
        with pytest.raises(PowerCut):
            train_run(make("died", **chosen))
    folder = train_run(make("died", **chosen))
    assert results(folder) == results(whole)
    assert (folder / "schedule.jsonl").read_bytes() == (whole / "schedule.jsonl").read_bytes()
    assert_each_group_is_trained_once(folder)
    log = events(folder)
    sampled = sum(line["rollout/groups_sampled"] for line in metrics_of(folder))
    assert sum(event["event"] == "admitted" for event in log) == sampled
    assert sum(event["event"] == "filtered" for event in log) == sampled - sum(
        event["event"] == "consumed" for event in log
    )
    assert any(event["event"] == "filtered" for event in log), "the rewards of this run pass all: choose others"
    assert results(train_run(make("again", **chosen), replay=whole)) == results(whole)


WORLD = '''
import pathlib, time
from posttrain.interfaces.env import EnvStart, EnvStep

class Guess:
    """Ends after 1 to 4 turns, by its seed, and answers after so many seconds; some not before ``late`` has two lines."""

    def __init__(self, spec, seconds=0.0, late=""):
        self.turn, self.seconds, self.late = 0, seconds, pathlib.Path(late)

    def reset(self, seed):
        self.turns, self.is_late = 1 + seed % 4, self.late.name and seed % 3 == 0
        return EnvStart(messages=[{"role": "user", "content": f"go {seed % 7}"}])

    def step(self, action):
        self.turn += 1
        time.sleep(self.seconds)
        deadline = time.monotonic() + 20.0
        while self.is_late and time.monotonic() < deadline and not self.is_trained():
            time.sleep(0.01)
        return EnvStep(
            messages=[{"role": "user", "content": "on"}], reward=len(action) / 10, done=self.turn == self.turns
        )

    def is_trained(self):
        return self.late.exists() and self.late.read_text().count("\\n") >= 2

    def close(self):
        return {"turns": float(self.turn)}
'''


def in_a_world(
    make: Make,
    place: Path,
    folder: str,
    workers: int = 0,
    seconds: float = 0.0,
    replay: Path | None = None,
    late: Path | str = "",
    **more: Any,
) -> Path:
    (place / "world.py").write_text(WORLD)
    sections: dict[str, Any] = {
        "data": {"train_files": [], "validation_files": [], "prompts_per_step": 2},
        "reward": {"timeout_s": 300.0},  # a busy machine must not change a reward
        "environment": {
            "name": f"{place}/world.py:Guess",
            "train_episodes": 10,
            "validation_episodes": 2,
            "workers": workers,
            "settings": {"seconds": seconds, "late": str(late)},
        },
    }
    return train_run(make(folder, **(sections | more)), replay=replay)


@pytest.mark.slow
def test_episodes_go_on_over_steps(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With environments in this process a run is a function of its seed, however many passes of the sampler fit into the time
    between two looks at the environments; at S = 0 it is the synchronous one."""
    runs = []
    for name, seconds in (("one", 0.0), ("two", 60.0)):
        monkeypatch.setattr(episodes_in_flight, "TURN_S", seconds)
        runs.append(in_a_world(make, tmp_path, name, asynchronous=COLOCATE))
    assert results(runs[0]) == results(runs[1])
    assert_each_group_is_trained_once(runs[0])
    rows = [
        json.loads(line)
        for step in range(1, STEPS + 1)
        for line in (runs[0] / f"samples/step_{step}.jsonl").read_text().splitlines()
    ]
    versions = {turn["policy_version"] for row in rows for turn in row["turns"]}
    mixed = [row for row in rows if len({turn["policy_version"] for turn in row["turns"]}) > 1]
    assert len(versions) > 1 and mixed
    assert max(line["async/staleness_steps_max"] for line in metrics_of(runs[0])) <= 2
    plain = in_a_world(make, tmp_path, "plain")
    ahead = in_a_world(make, tmp_path, "ahead", asynchronous={"mode": "colocate", "max_staleness_steps": 0})
    assert results(ahead) == results(plain)


@pytest.mark.slow
def test_slow_environments_answer_while_a_step_trains(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processes of their own; a run that dies begins the unfinished episodes again, and trains every group once."""
    slow: dict[str, Any] = {"workers": 12, "seconds": 0.02, "asynchronous": COLOCATE}
    with monkeypatch.context() as patch:
        at_update(patch, 4)
        with pytest.raises(PowerCut):
            in_a_world(make, tmp_path, "slow", **slow)
    folder = in_a_world(make, tmp_path, "slow", **slow)
    assert_each_group_is_trained_once(folder)
    consumed = Counter(event["step"] for event in events(folder) if event["event"] == "consumed")
    assert consumed == dict.fromkeys(range(1, STEPS + 1), 2)
    assert max(line["async/staleness_steps_max"] for line in metrics_of(folder)) <= 2


@pytest.mark.slow
def test_environments_that_are_prepared_ahead_change_no_decision(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each group is admitted in its order and trained once, within its bound, also by a run that died."""
    ahead: dict[str, Any] = {"workers": 24, "seconds": 0.01, "asynchronous": COLOCATE | {"prepared_groups": 4}}
    plain = in_a_world(make, tmp_path, "unprepared", **(ahead | {"asynchronous": COLOCATE}))
    with monkeypatch.context() as patch:
        at_update(patch, 4)
        with pytest.raises(PowerCut):
            in_a_world(make, tmp_path, "prepared", **ahead)
    folder = in_a_world(make, tmp_path, "prepared", **ahead)
    assert_each_group_is_trained_once(folder)
    admitted, expected = (
        [event["prompt_id"] for event in events(run) if event["event"] == "admitted"] for run in (folder, plain)
    )
    assert admitted == expected and len(admitted) == 2 * STEPS
    assert max(line["async/staleness_steps_max"] for line in metrics_of(folder)) <= 2


@pytest.mark.parametrize(
    "mode",
    [
        "colocate",
        "refill",
        pytest.param("one_step", marks=pytest.mark.slow),
        pytest.param("keep", marks=pytest.mark.slow),
    ],
)
def test_a_replayed_run_is_equal(make: Make, straight: Path, mode: str) -> None:
    """I5, from what schedule.jsonl says alone: the replaying ledger makes no choice of its own. With a kept cache the run is
    another one than without, and equal to itself."""
    sections: dict[str, Any] = {"asynchronous": ONE_STEP if mode == "one_step" else COLOCATE}
    if mode == "keep":
        sections = {"asynchronous": COLOCATE | {"cache_on_new_weights": "keep"}}
    if mode == "refill":
        sections["group_filter"] = {"strategy": "refill", "above_std": 0.3, "max_batches": 50}
    first = straight if mode == "colocate" else train_run(make("first", **sections))
    again = train_run(make("again", **sections), replay=first)
    assert results(again) == results(first)
    assert comparable(again) == comparable(first)
    assert mode != "keep" or results(first) != results(straight)


@pytest.mark.slow
@pytest.mark.parametrize(("first_s", "again_s"), [(0.01, 0.0), (0.0, 0.02)])
def test_episodes_are_replayed(make: Make, tmp_path: Path, first_s: float, again_s: float) -> None:
    """I5: two runs whose environments answer at other times are equal, when the second makes the decisions of the first: turns
    wait for the passes at which they came."""
    first = in_a_world(make, tmp_path, "first", workers=12, seconds=first_s, asynchronous=COLOCATE)
    again = in_a_world(make, tmp_path, "again", workers=14, seconds=again_s, asynchronous=COLOCATE, replay=first)
    assert results(again) == results(first)
    with pytest.raises(RequestError, match=r"had its environments 12 at once, and this one has 6 at once"):
        in_a_world(make, tmp_path, "fewer", workers=6, asynchronous=COLOCATE, replay=first)


@pytest.mark.slow
def test_dropped_groups_are_replayed_where_others_were_prepared_before_them(make: Make, tmp_path: Path) -> None:
    """A dropped prompt waits behind those whose environments are prepared already; the replay prepares none. Environments that
    answer only when two steps have been trained are late for both, however fast this machine is."""
    settings = COLOCATE | {"max_staleness_steps": 1, "on_stale": "drop", "prepared_groups": 3}
    sections: dict[str, Any] = {
        "workers": 12,
        "asynchronous": settings,
        "group_filter": {"strategy": "refill", "above_std": 0.1, "max_batches": 60},
        "late": tmp_path / "first/metrics.jsonl",
    }
    first = in_a_world(make, tmp_path, "first", seconds=0.01, **sections)
    assert any(event["event"] == "dropped" for event in events(first)), "no group of this run is late: choose others"
    assert_counts_hold(events(first))
    assert results(in_a_world(make, tmp_path, "again", replay=first, **sections)) == results(first)


@pytest.mark.slow
def test_a_run_that_differs_from_its_script_stops(make: Make, straight: Path, tmp_path: Path) -> None:
    """In its prompts, or in a reward although its decisions are the same."""
    other = make("other", asynchronous=COLOCATE, run={"seed": 2, "total_steps": STEPS})
    with pytest.raises(RunStopped, match="the run that is replayed differs from this one in step 1: group 0 is"):
        train_run(other, replay=straight)
    (tmp_path / "reward.py").write_text(REWARD.replace("value / 4", "value / 8"))
    differs = r"differs from this one in step 1: the samples of group \d+ \(train.jsonl:\d+\) are others"
    with pytest.raises(RunStopped, match=differs):
        train_run(make("rewarded", asynchronous=COLOCATE), replay=straight)
    bound = make("bound", asynchronous=COLOCATE | {"max_staleness_steps": 1})
    with pytest.raises(RequestError, match=r"had asynchronous.max_staleness_steps = 2, and this one has 1"):
        train_run(bound, replay=straight)
    plain = make("plain")
    with pytest.raises(RequestError, match=r"holds no schedule.jsonl: only asynchronous runs need one"):
        train_run(plain, replay=Path(plain.folder))


@pytest.mark.slow
def test_a_resumed_run_with_kept_caches_is_not_replayed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"asynchronous": COLOCATE | {"cache_on_new_weights": "keep"}}
    with monkeypatch.context() as patch:
        at_update(patch, 4)
        with pytest.raises(PowerCut):
            train_run(make("died", **kept))
    folder = train_run(make("died", **kept))
    with pytest.raises(RequestError, match="was resumed before step 3, where kept caches were computed again"):
        train_run(make("again", **kept), replay=folder)


DOMAINS = {
    "even": {"sources": ["even"], "prompts_per_step": 2},
    "odd": {"sources": ["odd"], "prompts_per_step": 1, "group_filter": {"strategy": "refill", "above_std": 0.3}},
}


def of_domains(folder: Path, **asynchronous: Any) -> dict[str, Any]:
    rows = [{"data_source": ("even", "odd")[n % 2], "prompt": f"{n}=", "answer": str(n)} for n in range(12)]
    (folder / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "data": {
            "train_files": [str(folder / "mixed.jsonl")],
            "validation_files": [],
            "prompts_per_step": 3,
            "domains": DOMAINS,
        },
        "asynchronous": asynchronous,
        "policy": {"sequences_per_mini_batch": 9, "sequences_per_micro_batch_per_device": 3, "optimizer": {"lr": 1e-3}},
        "group_filter": {"max_batches": 50},
    }


def assert_shares(folder: Path) -> None:
    for step in range(1, STEPS + 1):
        samples = [json.loads(line) for line in (folder / f"samples/step_{step}.jsonl").read_text().splitlines()]
        assert Counter(each["data_source"] for each in samples) == {"even": 6, "odd": 3}, step


@pytest.mark.parametrize("mode", [pytest.param("one_step", marks=pytest.mark.slow), "colocate"])
def test_sampling_ahead_keeps_the_shares_of_domains(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Every step has the groups of each domain, also after a run that died between two checkpoints, and in a replay. One
    domain has a filter, and draws more prompts while the other waits."""
    sections = of_domains(tmp_path, **(ONE_STEP if mode == "one_step" else COLOCATE))
    whole = train_run(make("whole", **sections))
    assert_shares(whole)
    assert_each_group_is_trained_once(whole)
    with monkeypatch.context() as patch:
        at_update(patch, 4)
        with pytest.raises(PowerCut):
            train_run(make("died", **sections))
    assert results(train_run(make("died", **sections))) == results(whole)
    assert results(train_run(make("again", **sections), replay=whole)) == results(whole)
    if mode == "colocate":
        log, lines = events(whole), metrics_of(whole)
        assert any(event["event"] == "filtered" for event in log)
        assert max(line["async/staleness_steps_max"] for line in lines) in (1.0, 2.0)
        assert {line["domain/odd/prompts"] for line in lines} == {1.0}


@pytest.mark.slow
def test_domains_without_staleness_are_those_of_the_synchronous_loop(make: Make, tmp_path: Path) -> None:
    sections = of_domains(tmp_path, mode="colocate", max_staleness_steps=0)
    sections["data"]["domains"] = {name: {**each, "group_filter": {}} for name, each in DOMAINS.items()}
    ahead = train_run(make("ahead", **sections))
    assert results(ahead) == results(train_run(make("plain", **sections | {"asynchronous": {}})))


@pytest.mark.slow
@pytest.mark.parametrize("proximal", ["recompute", "loglinear"])
def test_micro_batches_and_slots_change_numbers_by_rounding_only(make: Make, straight: Path, proximal: str) -> None:
    """I13, with groups of older weights: the same decisions, the same samples."""
    loss = CORRECTED | {"rollout_correction": {"weights": "token", "proximal": proximal}}
    first = straight
    if proximal == "loglinear":
        first = train_run(make("first", asynchronous=COLOCATE, loss=loss))
        weights = [
            load_file(run / f"checkpoints/global_step_{STEPS}/policy/model.safetensors") for run in (straight, first)
        ]
        assert any(not torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    other = train_run(
        make(
            "other",
            asynchronous=COLOCATE,
            loss=loss,
            policy={
                "sequences_per_mini_batch": 3,
                "sequences_per_micro_batch_per_device": 3,
                "optimizer": {"lr": 1e-3},
                "schedule": {"name": "cosine", "warmup_updates": 2},
            },
            reference={"sequences_per_micro_batch_per_device": 1},
        )
    )
    decisions = [[event | {"mark": ""} for event in events(run)] for run in (other, first)]
    assert decisions[0] == decisions[1]
    for one, two in zip(metrics_of(first), metrics_of(other), strict=True):
        for name, value in one.items():
            if not name.startswith(("time/", "speed/", "gap/")):
                assert two[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    weights = [load_file(run / f"checkpoints/global_step_{STEPS}/policy/model.safetensors") for run in (first, other)]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=0, atol=1e-5)


def test_a_step_does_not_wait_for_ever(make: Make, tmp_path: Path) -> None:
    """I10: an environment that never answers, although its own time is not over yet."""
    waiting = COLOCATE | {"wait_timeout_s": 0.3}
    with pytest.raises(RunStopped, match=r"no token for 0.3 s \(asynchronous.wait_timeout_s\), while step 1 waits for"):
        in_a_world(make, tmp_path, "silent", workers=6, seconds=600.0, asynchronous=waiting)
