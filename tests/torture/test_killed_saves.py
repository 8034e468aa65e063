"""Saves that are killed, or whose disk fails: a part of what `make torture` does."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import killing
import pytest
from killing import Position, Work

from posttrain.errors import RunStopped
from posttrain.stages.checkpoint import Checkpoints


@pytest.fixture(scope="module")
def work(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Work:
    return Work(tiny_llama, tmp_path_factory.mktemp("work"))


def test_saves_killed_at_a_random_instant(work: Work) -> None:
    tally = killing.random_kills(work, 10)
    assert tally.trials == 10 and tally.killed >= 3
    assert tally.failures == []


def test_saves_killed_at_file_operations(work: Work) -> None:
    tally = killing.operation_kills(work, stride=11)
    assert tally.trials >= 10
    assert tally.failures == []


@pytest.mark.slow
def test_saves_killed_at_every_file_operation(work: Work) -> None:
    tally = killing.operation_kills(work)
    assert tally.trials >= 100
    assert tally.failures == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_saves_killed_at_system_calls(work: Work) -> None:
    tally = killing.strace_kills(work, stride=5)
    assert tally.trials >= 50
    assert tally.failures == []


def test_the_sweep_finds_a_save_that_deletes_first(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    save = Checkpoints.save

    def careless(self: Checkpoints, step: int, *state: object) -> str:
        if step == 2:
            shutil.rmtree(self.folder / "global_step_1")
        return save(self, step, *state)  # type: ignore[arg-type]

    monkeypatch.setattr(Checkpoints, "save", careless)
    assert killing.operation_kills(work, stride=20).failures


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_at_any_operation_stops_the_run_with_a_checkpoint(work: Work, code: int) -> None:
    """The child's save raises RunStopped, or the error was one that does no harm and the save went through."""
    work.become(2)
    reasons = set()
    for number in range(1, 200, 17):
        trial = work.folder / "trial"
        checkpoints = work.start(trial)
        told, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:

                def fail() -> None:
                    raise OSError(code, os.strerror(code))

                killing.at_operation(number, fail)()
                checkpoints.save(2, work.engine, Position(2))  # type: ignore[arg-type]
                os.write(tell, b"saved")
            except RunStopped as error:
                os.write(tell, str(error).encode())
            finally:
                os._exit(0)
        os.close(tell)
        os.waitpid(pid, 0)
        said = os.read(told, 10_000).decode()
        os.close(told)
        reasons.add(said.rpartition(": ")[2])
        acknowledged = 2 if said == "saved" or "is whole" in said else 1
        assert work.verdict(trial, acknowledged) is None, f"operation {number}: {said}"
    assert os.strerror(code) in reasons
    assert len(reasons) >= 2  # libraries say it in words of their own, and some operations do no harm


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder to mount a small file system on."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=False).returncode:
        pytest.skip("needs the right to mount")
    subprocess.run(["umount", folder], check=True)
    yield folder


@pytest.mark.parametrize("looks", [True, False], ids=["seen before", "found while writing"])
def test_disk_full_at_ten_sizes(work: Work, small_disk: Path, looks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for the checkpoint of step 1 and 5, 15, ... 95 % of another."""
    work.become(2)
    if not looks:
        monkeypatch.setattr(work.engine, "saved_bytes", lambda: 0)
    size = sum(path.stat().st_size for path in (work.folder / "reference/global_step_1").rglob("*") if path.is_file())
    pages = 4096 * (12 + 4)  # files and folders take whole pages
    for percent in range(5, 105, 10):
        options = f"size={int(size * (1 + percent / 100)) + pages}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", small_disk], check=True)
        try:
            checkpoints = work.start(small_disk / "trial")
            with pytest.raises(RunStopped, match=r"bytes and .* free; nothing|No space left on device"):
                checkpoints.save(2, work.engine, Position(2))  # type: ignore[arg-type]
            assert sorted(path.name for path in (small_disk / "trial").iterdir()) == ["global_step_1", "latest"]
            assert killing.hashes(small_disk / "trial/global_step_1") == work.reference[1]
        finally:
            subprocess.run(["umount", small_disk], check=True)
