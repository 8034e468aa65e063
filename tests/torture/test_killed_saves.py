"""Saves that are killed, or whose disk fails: a part of what `make torture` does."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import failing
import killing
import pytest
from killing import Work

from posttrain.run.checkpoint import Checkpoints


@pytest.fixture(scope="module", params=[False, True], ids=["at once", "in the background"])
def work(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Work:
    return Work(tiny_llama, tmp_path_factory.mktemp("work"), background=request.param)


@pytest.mark.slow
def test_saves_killed_at_a_random_instant(work: Work) -> None:
    tally = killing.random_kills(work, 10)
    assert tally.killed == 10
    assert tally.failures == []


@pytest.mark.slow
def test_saves_killed_at_file_operations(work: Work) -> None:
    """Every third operation of both ways to save, not the same ones."""
    tally = killing.operation_kills(work, first=2 if work.background else 1, stride=3)
    assert tally.trials >= 33
    assert tally.failures == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_saves_killed_at_system_calls(work: Work) -> None:
    tally = killing.strace_kills(work, stride=9)
    assert tally.trials >= 30
    assert tally.failures == []


@pytest.mark.slow
def test_the_sweep_finds_a_save_that_deletes_first(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    save = Checkpoints.save

    def careless(self: Checkpoints, step: int, *state: object, background: bool = False) -> str:
        if step == 2:
            shutil.rmtree(self.folder / "global_step_1")
        return save(self, step, *state, background=background)  # type: ignore[arg-type]

    monkeypatch.setattr(Checkpoints, "save", careless)
    assert killing.operation_kills(work, stride=20).failures


@pytest.mark.slow
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_stops_the_run_with_a_checkpoint(work: Work, code: int) -> None:
    tally, reasons = failing.failing_operations(work, code, stride=17)
    assert tally.failures == [] and tally.trials >= 8
    assert os.strerror(code) in reasons
    assert len(reasons) >= 2  # libraries say it in words of their own, and some operations do no harm


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_a_disk_that_fails_at_system_calls(work: Work) -> None:
    tally = failing.failing_calls(work, errno.EIO, stride=5)
    assert tally.failures == [] and tally.killed >= 10


@pytest.mark.parametrize("looks", [True, False], ids=["seen before", "found while writing"])
def test_disk_full_at_ten_sizes(work: Work, tmp_path: Path, looks: bool) -> None:
    if not failing.can_mount():
        pytest.skip("needs the right to mount")
    tally = failing.full_disks(work, tmp_path, looks=looks)
    assert tally.failures == [] and tally.killed == 10


def test_two_trainers_in_one_folder(tmp_path: Path) -> None:
    tally = failing.two_trainers(tmp_path, 4)
    assert tally.failures == [] and tally.trials == 4
