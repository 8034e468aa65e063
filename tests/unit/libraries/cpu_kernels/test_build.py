"""A C++ source is compiled once for all processes, and whatever prevents it is a reason, not an error."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.libraries.compilers import find_compiler
from posttrain.libraries.cpu_kernels import build
from posttrain.libraries.cpu_kernels.build import compiled_library


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache folder, in which nothing is."""
    if find_compiler() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiled_library.cache_clear()
    yield tmp_path / "cache" / "posttrain" / "kernels"
    compiled_library.cache_clear()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "seven.cpp"
    (tmp_path / "number.h").write_text("#define NUMBER 7\n")
    file.write_text('#include "lanes.h"\n#include "number.h"\nextern "C" int seven() { return NUMBER; }\n')
    return file


def seven(source: Path) -> int:
    compiled_library.cache_clear()
    library = compiled_library(source)
    assert isinstance(library, ctypes.CDLL), library
    number: int = library.seven()
    return number


def test_compiled_once_for_all_processes(folder: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seven(source) == 7
    (made,) = folder.iterdir()
    monkeypatch.setattr(build, "_run", lambda command: subprocess.check_output([command[0], "--version"], text=True))
    assert seven(source) == 7
    assert [*folder.iterdir()] == [made]


def test_compiled_again_for_another_header(folder: Path, source: Path) -> None:
    assert seven(source) == 7
    source.with_name("number.h").write_text("#define NUMBER 8\n")
    assert seven(source) == 8
    assert len([*folder.iterdir()]) == 2


@pytest.mark.usefixtures("folder")
def test_without_a_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert compiled_library(source) == "no C++ compiler was found (install g++)"


@pytest.mark.usefixtures("folder")
def test_compiler_that_fails(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FLAGS", ("--no-such-flag",))
    reason = compiled_library(source)
    assert isinstance(reason, str) and "does not compile seven.cpp" in reason and "no-such-flag" in reason


@pytest.mark.usefixtures("folder")
def test_user_without_a_home(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(build, "user_cache", homeless)
    reason = compiled_library(source)
    assert isinstance(reason, str) and "cannot be compiled" in reason and "home directory" in reason


def test_folder_that_cannot_be_written(folder: Path, source: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("a file")
    reason = compiled_library(source)
    assert isinstance(reason, str) and "cannot be compiled" in reason and "kernels" in reason
