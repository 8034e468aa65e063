"""Runs that are killed and started again end as if nothing had happened."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import killing
import pytest
from runs import PPO, result, tiny_run

from posttrain.build.train import train_run
from posttrain.errors import RunInterrupted, RunStopped
from posttrain.run import checkpoint
from posttrain.run.trackers import Trackers
from posttrain.steps import update


@pytest.fixture(scope="module")
def straight(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of six steps that nothing disturbs. Do not write into it."""
    return train_run(tiny_run(tmp_path_factory.mktemp("straight"), tiny_llama, "straight", steps=6))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, PPO], ids=["grpo", "ppo"])
def test_ten_random_kills(tmp_path: Path, tiny_llama: Path, changes: dict[str, dict[str, Any]]) -> None:
    straight = train_run(tiny_run(tmp_path, tiny_llama, "straight", steps=30, **changes))
    config = tiny_run(tmp_path, tiny_llama, "killed", steps=30, **changes)
    killed = tmp_path / "killed"
    assert killing.run_with_kills(lambda: train_run(config), killed, straight, kills=10) >= 3
    assert result(killed) == result(straight)


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 4])
def test_killed_before_a_whole_checkpoint_is_in_its_place(
    tmp_path: Path, tiny_llama: Path, straight: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The next start puts it there, resumes from it, and keeps the records of the steps before."""
    config = tiny_run(tmp_path, tiny_llama, "killed", steps=6)
    replace = os.replace

    def killed(source: Any, target: Any, **rest: Any) -> None:
        if Path(source).name == f"global_step_{step}.tmp":
            killing.kill_self()
        replace(source, target, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        _, status = os.waitpid(killing.forked(lambda: train_run(config)), 0)
    assert os.WIFSIGNALED(status)
    assert result(train_run(config)) == result(straight)


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "steps"), [({}, (2, 3, 5, 7)), (PPO, (1, 4, 5, 6, 8, 9))], ids=["grpo", "ppo"])
def test_resuming_from_every_step_of_two_epochs(
    tmp_path: Path, tiny_llama: Path, changes: dict[str, dict[str, Any]], steps: tuple[int, ...]
) -> None:
    """Ten steps, five an epoch: from the checkpoints of some, the boundary's too, come the same samples, losses and weights; from
    those of the others with the other algorithm."""
    every = {**changes, "checkpoint": {"every_steps": 1, "keep_last": None}}
    straight = train_run(tiny_run(tmp_path, tiny_llama, "straight", steps=10, **every))
    expected = result(straight)
    for step in steps:
        again = Path(tiny_run(tmp_path, tiny_llama, "again", steps=10, **every).folder)
        shutil.rmtree(again, ignore_errors=True)
        shutil.copytree(straight, again)
        for later in range(step + 1, 11):
            shutil.rmtree(again / f"checkpoints/global_step_{later}")
            (again / f"samples/step_{later}.jsonl").unlink()
        (again / "checkpoints/latest").write_text(f"global_step_{step}\n")
        config = tiny_run(tmp_path, tiny_llama, "again", steps=10, **every)
        assert result(train_run(config)) == expected, f"from step {step}"


@pytest.mark.slow
def test_a_run_from_another_runs_checkpoint_makes_the_same_steps(
    tmp_path: Path, tiny_llama: Path, straight: Path
) -> None:
    fork = {
        "run": {
            "total_steps": 6,
            "folder": str(tmp_path / "fork"),
            "resume_path": str(straight / "checkpoints/global_step_4"),
        }
    }
    forked = train_run(tiny_run(straight.parent, tiny_llama, "fork", steps=6, **fork))
    weights = "checkpoints/global_step_6/policy/model.safetensors"
    assert (forked / weights).read_bytes() == (straight / weights).read_bytes()
    lines = [[json.loads(line) for line in (run / "metrics.jsonl").open()] for run in (forked, straight)]
    assert [line["step"] for line in lines[0]] == [5, 6]
    assert [line["policy/loss"] for line in lines[0]] == [line["policy/loss"] for line in lines[1][-2:]]
    again = train_run(
        tiny_run(straight.parent, tiny_llama, "fork", steps=6, **fork)
    )  # goes on from its own, and is done
    assert [json.loads(line)["step"] for line in (again / "metrics.jsonl").open()] == [5, 6]


@pytest.mark.slow
def test_a_disk_that_fills_up_stops_the_run_and_a_new_start_goes_on(
    tmp_path: Path, tiny_llama: Path, straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_run(tmp_path, tiny_llama, "full", steps=6)
    seen: list[int] = []

    class Usage:
        @property
        def free(self) -> int:
            seen.append(1)
            return 10**12 if len(seen) < 2 else 1000

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "disk_usage", lambda path: Usage())
        with pytest.raises(RunStopped, match=r"step 4 needs [\d,]+ bytes .*\nLast good checkpoint: global_step_2"):
            train_run(config)
    assert json.loads((tmp_path / "full/run.json").read_text())["status"] == "stopped"
    assert result(train_run(config)) == result(straight)


@pytest.mark.slow
def test_a_stop_in_any_phase_is_as_if_it_had_not_been(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM at the beginning of a phase of step 3, of every kind; nothing of the step is left but what was saved before."""
    straight = train_run(tiny_run(tmp_path, tiny_llama, "straight", steps=4, **PPO))
    begin = Trackers.phase
    for number, name in enumerate(("rollout", "reward", "logprobs", "values", "critic_update", "update", "validation")):
        config = tiny_run(tmp_path, tiny_llama, f"stopped{number}", steps=4, **PPO)

        def signalled(self: Trackers, phase: str, step: int, total: int | None = None, at: str = name) -> None:
            begin(self, phase, step, total)
            if (phase, step) == (at, 3):
                signal.raise_signal(signal.SIGTERM)

        with monkeypatch.context() as patch:
            patch.setattr(Trackers, "phase", signalled)
            with pytest.raises(RunInterrupted) as raised:
                train_run(config)
        left = name in ("rollout", "reward", "logprobs", "values")
        assert ("in step 3, which is made again" if left else "after step 3, saved as global_step_3") in str(
            raised.value
        )
        folder = Path(config.folder)
        assert (folder / "checkpoints/latest").read_text() == f"global_step_{2 if left else 3}\n"
        train_run(config)
        ours, theirs = result(folder), result(straight)
        if not left:  # the checkpoint of step 3 is one more than was planned, and pushed out that of step 2
            ours = {path: content for path, content in ours.items() if "global_step_3" not in path}
            theirs = {path: content for path, content in theirs.items() if "global_step_2" not in path}
        assert ours == theirs, name


@pytest.mark.slow
def test_the_grace_time_ends_a_phase_that_does_not(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = train_run(tiny_run(tmp_path, tiny_llama, "straight", steps=4))
    config = tiny_run(
        tmp_path, tiny_llama, "late", steps=4, run={"total_steps": 4, "grace_s": 0.3, "folder": str(tmp_path / "late")}
    )
    learn, seen = update.update, []

    def endless(*args: Any) -> Any:
        seen.append(1)
        if len(seen) == 3:
            signal.raise_signal(signal.SIGUSR1)
            time.sleep(300)
        return learn(*args)

    with monkeypatch.context() as patch:
        patch.setattr(update, "update", endless)
        start = time.monotonic()
        with pytest.raises(
            RunInterrupted, match=r"after the 0\.3 s of run\.grace_s, .* Last good checkpoint: global_step_2"
        ):
            train_run(config)
        assert time.monotonic() - start < 200
    assert json.loads((tmp_path / "late/run.json").read_text())["status"] == "interrupted"
    assert result(train_run(config)) == result(straight)


@pytest.mark.slow
def test_a_run_goes_on_elsewhere_from_what_was_uploaded(tmp_path: Path, tiny_llama: Path) -> None:
    """Six steps, uploaded; another folder goes on after step 4, from there, and both end with the same weights. Plain folders
    of the models are written on the way."""
    store = f"file://{tmp_path}/store"
    kept = {"checkpoint": {"every_steps": 2, "upload": store, "upload_keep_last": 2, "export_every_steps": 4}}
    straight = train_run(tiny_run(tmp_path, tiny_llama, "straight", steps=6, **kept))
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == [
        "global_step_4",
        "global_step_6",
        "latest",
        "run",
    ]
    assert sorted(path.name for path in (straight / "exports").iterdir()) == ["global_step_4", "global_step_6"]
    section = {"total_steps": 6, "folder": str(tmp_path / "there"), "resume_path": f"{store}/global_step_4"}
    there = train_run(tiny_run(tmp_path, tiny_llama, "there", steps=6, run=section))
    for path in ("policy/model.safetensors", "policy/optimizer.safetensors"):
        ours, theirs = (run / "checkpoints/global_step_6" / path for run in (there, straight))
        assert ours.read_bytes() == theirs.read_bytes()
    exported = (straight / "exports/global_step_6/policy/model.safetensors").read_bytes()
    assert exported == (straight / "checkpoints/global_step_6/policy/model.safetensors").read_bytes()
