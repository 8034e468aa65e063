"""One trainer per folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.errors import RequestError
from posttrain.run import lock
from posttrain.run.lock import only_trainer

HOLD = """
import sys
from pathlib import Path
from posttrain.run.lock import only_trainer
with only_trainer(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "PATIENCE_S", 0.2)


@pytest.fixture
def holder(tmp_path: Path) -> subprocess.Popen[str]:
    """Another process that holds the lock of ``run``."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_second_trainer_is_refused_and_told_of_the_first(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    said = (
        rf"another run is training in .*run \(process {holder.pid} on .+ since 20..-.*\); wait for it, stop it, or name"
    )
    with pytest.raises(RequestError, match=said), only_trainer(tmp_path / "run"):
        raise AssertionError("let in")
    assert (tmp_path / "run/lock").exists()


def test_lock_of_a_process_that_was_killed_is_taken_over(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with only_trainer(tmp_path / "run") as notes:
        assert len(notes) == 1 and f"(process {holder.pid} on " in notes[0]
    assert list((tmp_path / "run").iterdir()) == []


def test_two_folders_and_a_folder_named_twice(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    other = tmp_path / "deep" / "other"
    with only_trainer(other, other / "../other") as notes:
        assert notes == []
        (other / "file").touch()
    assert sorted(path.name for path in other.iterdir()) == ["file"]
    with pytest.raises(RequestError), only_trainer(other, tmp_path / "run"):
        raise AssertionError("let in")
    with only_trainer(other):  # the lock that was had is given back
        pass


def test_lock_with_nonsense_in_it(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("?")
    with only_trainer(tmp_path) as notes:
        assert notes == []
