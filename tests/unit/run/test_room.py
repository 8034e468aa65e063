"""The disk that checkpoints need is announced before the first step."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from posttrain.errors import RequestError
from posttrain.run.retention import Retention
from posttrain.run.room import checkpoint_room, text_of

GB = 10**9


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_frsize=1000, f_bavail=10 * GB // 1000))


@pytest.mark.parametrize(
    ("rules", "saves", "most"),
    [
        (Retention(last=2), range(5, 101, 5), 3),  # two, and the one that is written
        (Retention(last=2), [5], 1),
        (Retention(last=1, best=2), range(1, 10), 4),
        (Retention(last=1, every=10), range(5, 41, 5), 5),  # 10, 20, 30, 40, and the one that is written
    ],
)
@pytest.mark.usefixtures("free")
def test_it_is_announced(tmp_path: Path, rules: Retention, saves: list[int], most: int) -> None:
    text = checkpoint_room(tmp_path / "a/b", rules, GB, saves, "run.folder")
    assert text == f"disk: 1 GB for each checkpoint, {most} at once at most, in {tmp_path / 'a/b'} (10 GB free)"


@pytest.mark.usefixtures("free")
def test_a_disk_that_will_be_full_is_a_warning_with_the_step(tmp_path: Path) -> None:
    text = checkpoint_room(tmp_path, Retention(), 3 * GB, range(5, 101, 5), "run.folder") or ""
    # 20 of 3 GB, and 3 of them fit into 10 GB: those of steps 5, 10 and 15
    assert "3 GB for each checkpoint, 20 at once" in text and "about after step 15; set checkpoint.keep_last," in text


@pytest.mark.usefixtures("free")
def test_a_disk_without_room_for_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RequestError, match=r"a checkpoint needs 11 GB, and .* has 10 GB free; make room, name another run\.f"
    ):
        checkpoint_room(tmp_path, Retention(last=1), 11 * GB, [5], "run.folder")
    assert checkpoint_room(tmp_path, Retention(last=1), 11 * GB, [], "run.folder") is None


@pytest.mark.usefixtures("free")
def test_checkpoints_that_are_there_make_room(tmp_path: Path) -> None:
    for step in (5, 10):
        (tmp_path / f"global_step_{step}").mkdir()
    text = checkpoint_room(tmp_path, Retention(last=2), 5 * GB, [15, 20, 25, 30], "run.folder") or ""
    assert text.startswith("disk: 5 GB")  # one more, before the oldest goes


def test_sizes() -> None:
    assert [text_of(n) for n in (12, 3_700_000_000, 1_500, 2 * 10**12)] == ["12 bytes", "3.7 GB", "1.5 kB", "2 TB"]
