"""Checkpoints that are written while the next step samples are those that would have been written at once."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import PPO, result, tiny_run

from posttrain.backends.torch_training.optimized_model import OptimizedModel
from posttrain.build.train import train_run
from posttrain.errors import RunInterrupted, RunStopped
from posttrain.run import checkpoint
from posttrain.run.saving import BackgroundSave
from posttrain.run.trackers import Trackers

Changes = dict[str, dict[str, Any]]
LORA: Changes = {
    "policy": {
        "sequences_per_mini_batch": 3,
        "sequences_per_micro_batch_per_device": 2,
        "optimizer": {"lr": 1e-2},
        "lora": {"rank": 4, "dropout": 0.1},
    }
}


# No validation: the tests below are about signals and disks.
SHORT: Changes = {"validation": {"every_steps": None, "before_training": False, "after_training": False}}


def every_step(background: bool, changes: Changes) -> Changes:
    return {**changes, "checkpoint": {"every_steps": 1, "keep_last": None, "background": background}}


class Late(BackgroundSave):
    """Writes as late as it may: when it is waited for."""

    def begin(self, save: Callable[[Callable[[], None]], str]) -> None:
        self.save: Callable[[Callable[[], None]], str] | None = save

    @property
    def under_way(self) -> bool:
        return getattr(self, "save", None) is not None

    def wait(self) -> str | None:
        if not self.under_way:
            return None
        save, self.save = self.save, None
        assert save is not None
        return save(lambda: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="float32"),
        pytest.param({"model": {"compute_dtype": "bfloat16"}}, id="bfloat16"),
        pytest.param(LORA, id="lora"),
        pytest.param({**PPO, "critic": {**PPO["critic"], "warmup_steps": 1}}, id="ppo"),
        pytest.param({"rollout": {"engine": "hf", "samples_per_prompt": 3, "max_response_tokens": 6}}, id="hf"),
    ],
)
def test_nothing_changes_what_is_written_until_the_last_moment(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, changes: Changes
) -> None:
    """Sampling, scoring, log-probs and values of the next step come first; then the checkpoint is written, and is as if it had
    been written before all that."""
    straight = train_run(tiny_run(tmp_path, tiny_llama, "straight", steps=2, **every_step(False, changes)))
    monkeypatch.setattr(checkpoint, "BackgroundSave", Late)
    late = train_run(tiny_run(tmp_path, tiny_llama, "late", steps=2, **every_step(True, changes)))
    ours, theirs = result(late), result(straight)
    assert "checkpoints/global_step_1/policy/optimizer.safetensors" in ours
    assert sorted(path for path in ours | theirs if ours.get(path) != theirs.get(path)) == []


@pytest.fixture(scope="module")
def straight(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What three steps leave that nothing disturbs."""
    return result(train_run(tiny_run(tmp_path_factory.mktemp("straight"), tiny_llama, "run", steps=3, **SHORT)))


@pytest.fixture
def slow_writing(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The weights of step 2 are not written until the event is set."""
    go_on, writer = threading.Event(), OptimizedModel.writer

    def waiting(self: OptimizedModel, **what: bool) -> Callable[[Path], None]:
        write = writer(self, **what)

        def late(folder: Path) -> None:
            if "global_step_2." in str(folder):
                assert go_on.wait(30)
            write(folder)

        return late

    monkeypatch.setattr(OptimizedModel, "writer", waiting)
    return go_on


def at_phase(monkeypatch: pytest.MonkeyPatch, wanted: str, act: Callable[[], object]) -> list[str]:
    """Do something when a phase of step 3 begins. Returns the list that the phases of that step are put into."""
    begin, seen = Trackers.phase, []

    def phase(self: Trackers, name: str, step: int, total: int | None = None) -> None:
        begin(self, name, step, total)
        if step == 3:
            seen.append(name)
            if name == wanted:
                act()

    monkeypatch.setattr(Trackers, "phase", phase)
    return seen


@pytest.mark.slow
def test_the_next_step_samples_meanwhile_and_its_update_waits(
    tmp_path: Path,
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    slow_writing: threading.Event,
    straight: dict[str, bytes],
) -> None:
    """Writing goes on only once the next step waits for it: all before its update was done meanwhile."""
    seen = at_phase(monkeypatch, "checkpoint_wait", slow_writing.set)
    folder = train_run(tiny_run(tmp_path, tiny_llama, "run", steps=3, **SHORT))
    assert seen[:5] == ["rollout", "reward", "logprobs", "checkpoint_wait", "update"]
    times = [json.loads(line).get("time/checkpoint_wait_s") for line in (folder / "metrics.jsonl").open()]
    assert [time is not None for time in times] == [False, False, True]
    assert result(folder) == straight


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["rollout", "checkpoint_wait"])
def test_a_stop_while_it_is_written_waits_for_it(
    tmp_path: Path,
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    slow_writing: threading.Event,
    straight: dict[str, bytes],
    phase: str,
) -> None:
    def stop() -> None:
        signal.raise_signal(signal.SIGTERM)
        threading.Timer(0.2, slow_writing.set).start()

    with monkeypatch.context() as patch:
        at_phase(patch, phase, stop)
        config = tiny_run(tmp_path, tiny_llama, "run", steps=3, **SHORT)
        with pytest.raises(RunInterrupted, match=r"in step 3, which is made again .* saved as global_step_2"):
            train_run(config)
    assert (tmp_path / "run/checkpoints/latest").read_text() == "global_step_2\n"
    assert result(train_run(config)) == straight


@pytest.mark.slow
def test_a_second_signal_leaves_it_unfinished(
    tmp_path: Path,
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    slow_writing: threading.Event,
    straight: dict[str, bytes],
) -> None:
    def stop_twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    begun: list[threading.Thread] = []
    start = threading.Thread.start

    def remembered(self: threading.Thread) -> None:
        start(self)
        if self.name == "checkpoint":
            begun.append(self)

    config = tiny_run(tmp_path, tiny_llama, "run", steps=3, **SHORT)
    with monkeypatch.context() as patch:
        patch.setattr("atexit.register", lambda *_: None)  # this process goes on
        patch.setattr(threading.Thread, "start", remembered)
        at_phase(patch, "logprobs", stop_twice)
        with pytest.raises(KeyboardInterrupt):
            train_run(config)
    slow_writing.set()
    for thread in begun:
        thread.join(20)
    left = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert left == ["global_step_2.tmp", "owner.json"]
    assert result(train_run(config)) == straight


@pytest.mark.slow
def test_a_disk_that_fails_stops_the_run_before_the_next_update(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, straight: dict[str, bytes]
) -> None:
    config = tiny_run(tmp_path, tiny_llama, "run", steps=3, **SHORT)
    save = checkpoint.write_manifest

    def failing(folder: Path) -> None:
        if "global_step_2" in folder.name:
            raise OSError(28, "No space left on device")
        save(folder)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_manifest", failing)
        with pytest.raises(
            RunStopped, match=r"step 2 could not be written .*: No space .*\nLast good .*: none was saved"
        ):
            train_run(config)
    assert [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").open()] == [1, 2]
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "stopped"
    assert result(train_run(config)) == straight
