"""A user's own file, as it is now."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from posttrain.user_files import defined_at, failed_at, import_path, own_line, run_file


def test_a_file_that_was_changed_within_the_second_is_run_as_it_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same length and the same whole second, it is unchanged for Python's own cache."""
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    file = tmp_path / "reward.py"
    found = []
    for text in ("SCALE = 4\n", "SCALE = 8\n"):
        file.write_text(text)
        os.utime(file, (1_000_000_000, 1_000_000_000))
        found += [import_path(str(file)).SCALE, run_file(f"again_{text[-2]}", file).SCALE]
    assert found == [4, 4, 8, 8]
    assert [each.name for each in tmp_path.iterdir()] == ["reward.py"]


def test_a_file_of_a_package_imports_what_stands_beside_it_and_above(tmp_path: Path) -> None:
    """Their package's own __init__.py, which may need a whole framework, is not run."""
    package = tmp_path / "own" / "scores"
    package.mkdir(parents=True)
    (tmp_path / "own/__init__.py").write_text("import a_framework_that_is_not_there\n")
    (package / "__init__.py").write_text("")
    (tmp_path / "own/limits.py").write_text("LARGEST = 4\n")
    (package / "near.py").write_text("from ..limits import LARGEST\nSCALE = 2 * LARGEST\n")
    (package / "score.py").write_text("from . import near\nfrom .near import SCALE\nTOLD = near.SCALE + SCALE\n")
    assert import_path(str(package / "score.py")).TOLD == 16


def test_files_of_one_name_in_two_packages_stay_apart(tmp_path: Path) -> None:
    for name, value in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "near.py").write_text(f"VALUE = {value}\n")
        (tmp_path / name / "score.py").write_text("from .near import VALUE\n")
    assert [import_path(str(tmp_path / name / "score.py")).VALUE for name in ("one", "two")] == [1, 2]


def test_errors_are_placed_in_the_users_own_lines(tmp_path: Path) -> None:
    (file := tmp_path / "mine.py").write_text(
        "import json\n\ndef parse(text):\n    return json.loads(text)\n\nclass Rows:\n    pass\n"
    )
    mine = import_path(str(file))
    assert defined_at(mine.parse) == f"{file}:3" and defined_at(mine.Rows) == f"{file}:6"
    assert defined_at(len) == "len"
    with pytest.raises(ValueError) as in_library:
        mine.parse("{")
    assert own_line(in_library.value) == failed_at(in_library.value, mine.parse) == f"{file}:4"
    with pytest.raises(TypeError) as in_call:
        mine.parse()
    assert failed_at(in_call.value, mine.parse) == f"{file}:3"
