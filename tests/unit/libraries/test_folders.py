"""Folders that are written into."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from posttrain.errors import RequestError
from posttrain.libraries.folders import make_folder, user_cache


def test_a_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    make_folder(folder)
    make_folder(folder)  # it may be there
    assert folder.is_dir() and list(folder.iterdir()) == []


@pytest.mark.parametrize("folder", ["/proc/x", "/proc", "file", "file/below"])
def test_what_cannot_be_made_or_written_into_is_named(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(RequestError) as raised:
        make_folder(Path(folder))
    assert str(raised.value).startswith(f"nothing can be written into the folder {folder}: ")
    assert "name another folder" in str(raised.value)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EINVAL, errno.ENODEV, errno.EIO, errno.ENAMETOOLONG])
def test_whatever_the_system_has_against_it_is_told(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mkdir(path: Path, **options: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(RequestError, match=f"{tmp_path}/x: {os.strerror(number)}; name another folder"):
        make_folder(tmp_path / "x")


def test_cache_follows_xdg_cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "posttrain"
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # the standard says: empty counts as unset
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert user_cache() == tmp_path / "me" / ".cache" / "posttrain"
