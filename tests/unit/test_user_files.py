"""A user's own file, as it is now."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from posttrain.user_files import import_path, run_file


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
