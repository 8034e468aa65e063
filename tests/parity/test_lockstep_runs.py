"""Runs of ``colocate`` whose sampler is several workers that advance by the same passes, in one process. Those of Ray are in
test_ray_colocate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_async_runs import (
    COLOCATE,
    assert_each_group_is_trained_once,
    at_update,
    events,
    in_a_world,
    ragged,
    results,
)
from test_runs import Make, PowerCut, comparable, maker

from posttrain.backends.rollout.native import NativeEngine
from posttrain.backends.runtime.inprocess import InProcess
from posttrain.build.train import train_run
from posttrain.errors import RunStopped
from posttrain.interfaces.roles import Roles

pytest.importorskip("ray")
from lockstep_workers import Workers


class Several:
    """Samplers that read the trainer's weights; ``generate`` is for validation."""

    note = ""

    def __init__(self, first: Any, count: int, backwards: bool):
        more = [
            NativeEngine(first.model, first.tokenizer, max_concurrent_sequences=4, max_prefill_tokens=300)
            for _ in range(count)
        ]
        self._workers = Workers(more, backwards=backwards)
        self._first = first
        self.open_stream = self._workers.open_stream
        self.generate = first.generate

    @property
    def version(self) -> int:
        return int(self._first.version)

    def weights_changed(self, version: int) -> None:
        self._first.weights_changed(version)
        self._workers.weights_changed(version)


def with_workers(patch: pytest.MonkeyPatch, count: int, *, backwards: bool = False) -> None:
    start = InProcess.start

    def started(self: InProcess, *arguments: Any) -> Roles:
        roles = start(self, *arguments)
        return replace(roles, rollout=Several(roles.rollout, count, backwards))  # type: ignore[arg-type]

    patch.setattr(InProcess, "start", started)


@pytest.fixture
def make(tmp_path: Path, tiny_llama: Path) -> Make:
    return ragged(maker(tmp_path, tiny_llama))


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["recompute", "keep"])
def test_a_run_does_not_depend_on_who_answers_first(make: Make, cache: str) -> None:
    """I6; and I5: a replay is the same run, to the byte."""
    mode = COLOCATE | {"cache_on_new_weights": cache}
    with pytest.MonkeyPatch.context() as patch:
        with_workers(patch, 3)
        first = train_run(make("first", asynchronous=mode))
        replay = train_run(make("replay", asynchronous=mode), replay=first)
    assert results(replay) == results(first) and comparable(replay) == comparable(first)
    decisions = [sorted((run / "schedule.jsonl").read_text().splitlines()) for run in (first, replay)]
    assert decisions[0] == decisions[1]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RunStopped, match="the run that is replayed differs"):
        with_workers(patch, 2)
        train_run(make("fewer", asynchronous=mode), replay=first)
    with pytest.MonkeyPatch.context() as patch:
        with_workers(patch, 3, backwards=True)
        again = train_run(make("again", asynchronous=mode))
    assert results(again) == results(first) and comparable(again) == comparable(first)
    assert (again / "schedule.jsonl").read_bytes() == (first / "schedule.jsonl").read_bytes()
    assert any(event["event"] == "cut" and event["token"] > 0 for event in events(first))
    assert_each_group_is_trained_once(first)


@pytest.mark.slow
def test_a_run_that_died_resumes_without_loss(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """I2 and I11; also every later checkpoint is the same, file by file."""
    with_workers(monkeypatch, 2)
    sections: dict[str, Any] = {"asynchronous": COLOCATE, "checkpoint": {"every_steps": 1}}
    whole = train_run(make("whole", **sections))
    with monkeypatch.context() as patch:
        at_update(patch, 3)
        with pytest.raises(PowerCut):
            train_run(make("died", **sections))
    folder = train_run(make("died", **sections))
    assert results(folder) == results(whole) and comparable(folder) == comparable(whole)
    for one in (whole / "checkpoints").rglob("ahead.json"):
        assert (folder / one.relative_to(whole)).read_bytes() == one.read_bytes()


@pytest.mark.slow
def test_episodes_are_the_same_twice(make: Make, tmp_path: Path) -> None:
    runs = []
    for backwards in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            with_workers(patch, 2, backwards=backwards)
            runs.append(in_a_world(make, tmp_path, f"world{backwards}", asynchronous=COLOCATE))
    assert results(runs[0]) == results(runs[1])
    assert_each_group_is_trained_once(runs[0])
