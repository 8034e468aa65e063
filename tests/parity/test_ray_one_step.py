"""``one_step`` with workers of Ray and samplers on devices of their own: sampling works while the step trains, the run is that of
one process, and samplers and the driver may end in the middle of it."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ray_runs import assert_same, config
from test_async_runs import RAGGED, assert_each_group_is_trained_once, at_update, events
from test_ray_colocate import STEPS, results
from test_runs import PowerCut, comparable

from posttrain.backends.runtime.ray.rollout import RemoteRollout, _Sampling
from posttrain.backends.runtime.ray.watch import Member
from posttrain.build.train import train_run
from posttrain.config import RunConfig
from posttrain.errors import RunInterrupted
from posttrain.steps import one_step, rl_step

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

LONG_S = 120.0  # what is not there by then does not come
Sections = dict[str, dict[str, Any]]
Patch = pytest.MonkeyPatch


def asked(
    folder: Path, model: Path, name: str, address: str | None, samplers: int = 1, trainers: int = 1, **more: Any
) -> RunConfig:
    """Without an address in one process; else on so many trainers and samplers."""
    sections: Sections = {
        "asynchronous": {"mode": "one_step"},
        "rollout": RAGGED,
        "policy": {"sequences_per_mini_batch": 3},
        "loss": {"kl_coef": 0.01, "rollout_correction": {"weights": "token"}},
        "checkpoint": {"every_steps": 2},
        "data": {"prompts_per_step": 2},
    }
    if address is not None:
        devices = {"devices": trainers + samplers, "runtime": "ray", "ray_address": address}
        more = more | {"placement": devices, "reference": {"devices": list(range(trainers))}}
        sections["policy"] |= {"devices": list(range(trainers)), "engine": "local" if trainers == 1 else "fsdp"}
        sections["rollout"] = RAGGED | {"devices": list(range(trainers, trainers + samplers))}
    merged = {each: sections.get(each, {}) | more.get(each, {}) for each in sections | more.keys()}
    return config(folder, model, name, merged, steps=STEPS)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """The run of one process. Do not write into it."""
    return train_run(asked(tmp_path_factory.mktemp("alone"), tiny_llama, "alone", None))


def assert_equal(found: Path, expected: Path) -> None:
    assert results(found) == results(expected)
    assert comparable(found) == comparable(expected)
    assert (found / "schedule.jsonl").read_bytes() == (expected / "schedule.jsonl").read_bytes()
    assert_each_group_is_trained_once(found)


@contextmanager
def each_waits_for_the_other(patch: Patch) -> Iterator[list[str]]:
    """The next batch is not sampled before the step's updates begin, and these do not end before it is sampled. Yields: the
    number of steps for which that came true."""
    training, sampled, done = threading.Event(), threading.Event(), []
    respond, update = one_step.respond, rl_step.update_models

    def sampling(*given: Any) -> Any:
        assert training.wait(LONG_S), "the step does not train while its following one is sampled"
        groups = respond(*given)
        sampled.set()
        return groups

    def updating(*given: Any) -> Any:
        stats = update(*given)
        if len(done) < STEPS - 1:
            training.set()
            assert sampled.wait(LONG_S), "the following step is not sampled while this one trains"
            training.clear()
            sampled.clear()
            done.append("overlapped")
        return stats

    with patch.context() as patched:
        patched.setattr(one_step, "respond", sampling)
        patched.setattr(rl_step, "update_models", updating)
        yield done


def test_the_next_batch_is_sampled_while_the_step_trains(
    address: str, alone: Path, tmp_path: Path, tiny_llama: Path, monkeypatch: Patch
) -> None:
    """I4 and I5: the numbers are those of one process, which samples before the updates and whose decisions are made again."""
    with each_waits_for_the_other(monkeypatch) as done:
        found = train_run(asked(tmp_path, tiny_llama, "found", address), replay=alone)
    assert len(done) == STEPS - 1
    assert_equal(found, alone)


@pytest.mark.parametrize("how", ["died", "signal"])
def test_a_run_that_ended_while_both_worked_resumes(
    address: str, alone: Path, tmp_path: Path, tiny_llama: Path, monkeypatch: Patch, how: str
) -> None:
    """I2: after the updates of step 4; or a signal in the middle of step 3, which ends with its step, or leaves it."""
    with monkeypatch.context() as patch:
        if how == "died":
            at_update(patch, 4)
            with pytest.raises(PowerCut):
                train_run(asked(tmp_path, tiny_llama, "found", address))
        else:
            at_sampling(patch, 3, lambda member: os.kill(os.getpid(), signal.SIGTERM))
            with pytest.raises(RunInterrupted):
                train_run(asked(tmp_path, tiny_llama, "found", address))
    assert not [each for each in threading.enumerate() if each.name == "sampler"], "the thread that samples has ended"
    assert_equal(train_run(asked(tmp_path, tiny_llama, "found", address)), alone)


@contextmanager
def signal_after_updates(patch: Patch, step: int) -> Iterator[None]:
    """SIGTERM at the end of the updates of ``step``, while the batch of the next one is being sampled."""
    training, signalled, batches = threading.Event(), threading.Event(), []
    respond, update = one_step.respond, rl_step.update_models
    updates: list[int] = []

    def sampling(roles: Any, prompts: Any, sampled: Any, on_tokens: Any, on_group: Any) -> Any:
        batches.append(len(prompts))
        if len(batches) == step:  # that of step 2 is the first in the thread
            training.set()
            assert signalled.wait(LONG_S), "the step does not train while its following one is sampled"
        return respond(roles, prompts, sampled, on_tokens, on_group)

    def updating(*given: Any) -> Any:
        stats = update(*given)
        updates.append(1)
        if len(updates) == step:
            assert training.wait(LONG_S), "the following step is not sampled while this one trains"
            os.kill(os.getpid(), signal.SIGTERM)
            signalled.set()
        return stats

    with patch.context() as patched:
        patched.setattr(one_step, "respond", sampling)
        patched.setattr(rl_step, "update_models", updating)
        yield


def test_a_signal_in_the_updates_leaves_the_next_batch(
    address: str, alone: Path, tmp_path: Path, tiny_llama: Path, monkeypatch: Patch
) -> None:
    """Its sampling does not end first: the resumed run samples it whole, with the weights of before, so that all but the metrics
    which count what a step has sampled is the same. It dies once more, and resumes from the same checkpoint."""
    run = asked(tmp_path, tiny_llama, "found", address, samplers=2)
    with signal_after_updates(monkeypatch, 2), pytest.raises(RunInterrupted, match="after step 2, saved as"):
        train_run(run)
    saved = Path(run.folder) / "checkpoints/global_step_2"
    assert json.loads((saved / "ahead.json").read_text())["owed"] and list((saved / "ahead").glob("*.safetensors"))
    with monkeypatch.context() as patch:
        at_update(patch, 2)  # step 4: what step 3 has decided is written already
        with pytest.raises(PowerCut):
            train_run(run)
    found = train_run(run)
    assert_same(found, alone, leaving=("async/groups_ahead", "step/sampled_tokens"))
    decided = [[event | {"mark": ""} for event in events(each)] for each in (found, alone)]
    assert decided[0] == decided[1]
    assert_each_group_is_trained_once(found)
    assert not (found / "ahead").exists()


def test_a_batch_that_is_owed_without_its_weights_is_sampled_with_the_present_ones(
    address: str, tmp_path: Path, tiny_llama: Path, monkeypatch: Patch
) -> None:
    """Servers do not give their weights back: the batch is on-policy, and says so. The sampler here pretends to be one."""
    run = asked(tmp_path, tiny_llama, "found", address)
    with monkeypatch.context() as patch:
        patch.setattr(RemoteRollout, "keep_weights", lambda self, folder: False)
        with signal_after_updates(patch, 2), pytest.raises(RunInterrupted, match="after step 2, saved as"):
            train_run(run)
    found = train_run(run)
    assert_each_group_is_trained_once(found)
    # Two updates a step: step 3 trains on what the resumed run samples first
    assert versions_by_step(found) == [{0}, {0}, {4}, {4}]


def versions_by_step(folder: Path) -> list[set[int]]:
    files = [folder / f"samples/step_{step}.jsonl" for step in range(1, STEPS + 1)]
    return [{json.loads(line)["policy_version"] for line in file.read_text().splitlines()} for file in files]


def at_sampling(patch: Patch, batch: int, act: Callable[[Member], object]) -> None:
    """Do something right after a worker got the prompts of this batch, which is sampled in the thread."""
    ask, seen = _Sampling._ask, [0]

    def asking(self: _Sampling, member: Member, numbers: list[int]) -> None:
        ask(self, member, numbers)
        if member.name.endswith("rank 0") and threading.current_thread().name == "sampler":
            seen[0] += 1
            if seen[0] == batch - 1:  # the first batch is sampled before the first step
                act(member)

    patch.setattr(_Sampling, "_ask", asking)


def kill(member: Member) -> None:
    os.kill(member.process.pid, signal.SIGKILL)


def test_the_prompts_of_a_lost_sampler_go_to_another(
    address: str, alone: Path, tmp_path: Path, tiny_llama: Path, monkeypatch: Patch
) -> None:
    """Where a response is sampled changes no more than rounding, so the run is the same; the lost sampler serves again."""
    with monkeypatch.context() as patch:
        at_sampling(patch, 3, kill)
        found = train_run(asked(tmp_path, tiny_llama, "found", address, samplers=2))
    assert_same(found, alone)
    assert_each_group_is_trained_once(found)
    workers = json.loads((found / "workers/workers.json").read_text())
    assert {"rollout rank 0", "rollout rank 1"} <= workers.keys()


def test_the_only_sampler_starts_again_with_the_weights_after_the_updates(
    address: str, tmp_path: Path, tiny_llama: Path, monkeypatch: Patch
) -> None:
    """It cannot get those before, so the batch is on-policy, and says so: every group is trained once."""
    with monkeypatch.context() as patch:
        at_sampling(patch, 3, kill)
        found = train_run(asked(tmp_path, tiny_llama, "found", address))
    assert_each_group_is_trained_once(found)
    # Two updates a step: steps 2 and 4 train on what the step before has started with
    assert versions_by_step(found) == [{0}, {0}, {4}, {4}]


def test_a_reward_model_on_the_trainers_device_scores_meanwhile(
    address: str, tmp_path: Path, tiny_llama: Path, tiny_scorer: Path
) -> None:
    """It shares the policy's worker: its calls and those of the trainer take turns."""
    scored: Sections = {"reward": {"model": {"path": str(tiny_scorer), "weight": 0.5}}}
    expected = train_run(asked(tmp_path, tiny_llama, "expected", None, **scored))
    scored["reward"]["model"]["devices"] = [0]
    assert_equal(train_run(asked(tmp_path, tiny_llama, "found", address, **scored)), expected)


def test_devices_and_micro_batches_change_numbers_by_rounding_only(
    address: str, tmp_path: Path, tiny_llama: Path
) -> None:
    """I13: two trainers with micro-batches of three, and one with micro-batches of one, train on the same groups."""
    one, three = (
        {
            "sequences_per_mini_batch": 6,
            "sequences_per_micro_batch_per_device": sequences,
            # The first gradient of one weight of this run is 1.5e-8, where others are 1.4e-2: a sum over tokens that cancels, and
            # whose last digits (7e-10) depend on how micro-batches cut it. With Adam's usual 1e-8 that moves it by 1e-5
            "optimizer": {"lr": 1e-3, "eps": 1e-5},
        }
        for sequences in (1, 3)
    )
    expected = train_run(asked(tmp_path, tiny_llama, "expected", None, policy=one))
    found = train_run(asked(tmp_path, tiny_llama, "found", address, trainers=2, policy=three))
    decisions = [[event | {"mark": ""} for event in events(run)] for run in (found, expected)]
    assert decisions[0] == decisions[1]
    assert_same(found, expected)
