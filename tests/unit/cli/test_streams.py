"""A process whose messages nobody reads any more continues, and its files keep their own numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = "from posttrain.cli.streams import keep_streams; import os, sys; keep_streams(); "


def run(code: str, redirections: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python of its own, started by a shell with these redirections."""
    shell = f'exec "$0" -c "$1" {redirections}'
    return subprocess.run(
        ["bash", "-c", shell, sys.executable, BEGIN + code], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("redirections", ["2>/dev/full", "2> >(exit 0)", "2>&-"])
def test_messages_that_cannot_be_written_are_dropped(redirections: str) -> None:
    code = "[print(n, file=sys.stderr, flush=True) or os.write(2, b'x') for n in range(3)]; print('done')"
    done = run("import time; time.sleep(0.2); " + code, redirections)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_messages_that_are_read_come_whole() -> None:
    done = run("print('caf\u00e9', file=sys.stderr); raise SystemExit('bad ' + chr(0xdc80))", "")
    assert (done.returncode, done.stderr) == (1, "caf\u00e9\nbad \\udc80\n")


def test_files_do_not_take_the_place_of_closed_streams(tmp_path: Path) -> None:
    """Without it the file would be number 0, 1 or 2, and get what is printed."""
    path = tmp_path / "weights"
    prints = "print('a'); print('b', file=sys.stderr); os.write(2, b'c')"
    code = f"file = open({str(path)!r}, 'w'); assert file.fileno() > 2; {prints}"
    done = run(code, "<&- >&- 2>&-")
    assert (done.returncode, path.read_text()) == (0, "")


def test_a_result_that_cannot_be_written_is_an_error() -> None:
    assert run("print('result', flush=True)", ">/dev/full").returncode == 1
