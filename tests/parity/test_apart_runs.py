"""Asynchronous runs whose samplers work apart, on a tiny model: two samplers in threads, with copies of the weights."""

from __future__ import annotations

import json
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crews import MortalCrew
from test_async_runs import (
    STEPS,
    assert_each_group_is_trained_once,
    events,
    ragged,
    results,
    without,
)
from test_runs import Make, comparable, maker, metrics_of

from posttrain.backends.rollout.native import NativeEngine
from posttrain.backends.runtime.inprocess import InProcess
from posttrain.build.train import train_run
from posttrain.interfaces.roles import Roles
from posttrain.interfaces.rollout_engine import Served
from posttrain.interfaces.train_engine import TrainEngine
from posttrain.models.weight_transfer import manifest_of
from posttrain.steps.seat import StreamSeat

SEPARATE = {"mode": "separate", "max_staleness_steps": 2}


class Samplers:
    """A crew of copies of the policy's model, with hooks for tests."""

    def __init__(self, count: int, *, renews: bool = False):
        self.count, self.renews = count, renews
        self.crew: MortalCrew | None = None
        self.served: list[tuple[str, int]] = []  # by every seat, with each weights

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
            return StreamSeat(engines[name], resumes=True)

        def send(policy: TrainEngine) -> Served:
            manifest = manifest_of(model.named_parameters(), policy.version)
            for name, engine in engines.items():
                for mine, theirs in zip(engine.model.parameters(), model.parameters(), strict=True):
                    mine.data.copy_(theirs.data)
                engine.weights_changed(policy.version)
                self.served.append((name, policy.version))
            roles.rollout.weights_changed(policy.version)
            return Served(policy.version, manifest.content_hash)

        seats = {f"sampler {number}": seat(f"sampler {number}") for number in range(self.count)}
        self.crew = MortalCrew(seats, send, renew=seat if self.renews else None)
        return self.crew


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


def orders(folder: Path) -> dict[int, list[tuple[Any, ...]]]:
    """What every sampler was told, in its order."""
    found: dict[int, list[tuple[Any, ...]]] = {}
    for event in events(folder):
        if "sampler" in event:
            told = tuple(json.dumps(event.get(name)) for name in ("event", "pass", "sent", "version", "hash"))
            found.setdefault(event["sampler"], []).append(told)
    return found
