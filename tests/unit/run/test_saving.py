"""Checkpoints that are written in the background: unit tests of the thread; tests/torture has whole runs."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from posttrain.errors import RunStopped
from posttrain.run.checkpoint import Checkpoints
from posttrain.run.checkpoint_folders import damage_of, steps_in
from posttrain.run.progress import Progress
from posttrain.run.saving import SaveGivenUp


class Position:
    def __init__(self, at: int = 0) -> None:
        self.at = at

    def state(self) -> dict[str, int]:
        return {"at": self.at}


class Engine:
    """Writes a file when it is let go on."""

    def __init__(self, error: Exception | None = None) -> None:
        self.go_on = threading.Event()
        self.error = error

    def saved_bytes(self) -> int:
        return 1

    def save(self, folder: Path, *, optimizer: bool) -> None:
        (folder / "weights").write_text("at once")

    def writer(self, *, optimizer: bool, sharded: bool) -> Callable[[Path], None]:
        def write(folder: Path) -> None:
            assert self.go_on.wait(20)
            if self.error:
                raise self.error
            (folder / "weights").write_text(f"optimizer {optimizer}")

        return write


def save(checkpoints: Checkpoints, step: int, engine: Engine, position: Position | None = None) -> str:
    return checkpoints.save(step, Progress(policy=engine, loader=position or Position()), background=True)  # type: ignore[arg-type]


def test_it_is_saved_when_it_was_waited_for(tmp_path: Path) -> None:
    checkpoints, engine, position = Checkpoints(tmp_path), Engine(), Position(3)
    assert save(checkpoints, 1, engine, position) == "global_step_1"
    position.at = 4  # the next step draws prompts
    assert checkpoints.saving and not checkpoints.exist() and not (tmp_path / "latest").exists()
    engine.go_on.set()
    assert checkpoints.wait() == "global_step_1"
    assert not checkpoints.saving and checkpoints.wait() is None
    assert damage_of(tmp_path / "global_step_1") is None
    assert (tmp_path / "global_step_1/policy/weights").read_text() == "optimizer True"
    assert json.loads((tmp_path / "global_step_1/run.json").read_text())["loader"] == {"at": 3}
    assert (tmp_path / "latest").read_text() == "global_step_1\n"


def test_the_next_save_waits_for_the_one_before(tmp_path: Path) -> None:
    checkpoints, engine = Checkpoints(tmp_path), Engine()
    save(checkpoints, 1, engine)
    threading.Timer(0.1, engine.go_on.set).start()
    checkpoints.save(2, Progress(policy=engine, loader=Position()))  # type: ignore[arg-type]
    assert steps_in(checkpoints.folder) == [1, 2]
    assert (tmp_path / "latest").read_text() == "global_step_2\n"


@pytest.mark.parametrize("next_one", [lambda one: one.wait(), lambda one: save(one, 2, Engine())])
def test_a_disk_that_fails_is_told_where_it_is_waited_for(
    tmp_path: Path, next_one: Callable[[Checkpoints], object]
) -> None:
    checkpoints, engine = Checkpoints(tmp_path), Engine(OSError(28, "No space left on device"))
    save(checkpoints, 1, engine)
    engine.go_on.set()
    with pytest.raises(
        RunStopped, match=r"the checkpoint of step 1 could not be written to .*: No space left on device"
    ):
        next_one(checkpoints)
    assert list(tmp_path.iterdir()) == []
    assert checkpoints.wait() is None  # told once


def test_a_mistake_in_the_engine_is_told_as_it_is(tmp_path: Path) -> None:
    checkpoints, engine = Checkpoints(tmp_path), Engine(KeyError("weight"))
    save(checkpoints, 1, engine)
    engine.go_on.set()
    with pytest.raises(KeyError, match="weight"):
        checkpoints.wait()
    assert not checkpoints.exist()


def test_what_was_given_up_never_looks_like_a_checkpoint(tmp_path: Path) -> None:
    checkpoints, engine = Checkpoints(tmp_path), Engine()
    save(checkpoints, 1, engine)
    checkpoints.give_up()
    engine.go_on.set()
    with pytest.raises(SaveGivenUp):
        checkpoints.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_1.tmp"]  # the next start removes it


def test_a_process_that_gives_up_ends_at_once() -> None:
    """Also in the middle of compiled code, which a thread cannot be taken out of: here of a hash that takes minutes."""
    code = """
import hashlib, sys, time
from posttrain.run.saving import BackgroundSave

saving = BackgroundSave()
saving.begin(lambda go_on: hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9).hex())
time.sleep(0.2)
saving.give_up()
sys.exit(1)
"""
    start = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (130, "")
    assert time.monotonic() - start < 30
