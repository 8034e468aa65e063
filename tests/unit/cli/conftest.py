"""posttrain's command line as its user types it, in a folder of its own."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from posttrain.cli.app import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs ``posttrain`` with arguments, and ``typed`` as what its user types; returns the exit code and what was printed."""
    monkeypatch.chdir(tmp_path)
    for name in ("TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "THP_MEM_ALLOC_ENABLE"):
        monkeypatch.setenv(name, "1")

    def run(*arguments: str, typed: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["posttrain", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    return run
