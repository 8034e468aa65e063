"""Samplers that are lost beside others, then a rank that trains: `benchmarks/deaths.py` with few of them, without models.

python benchmarks/deaths.py --workers 2 --samplers 64 --light 2 --kills 6   is the same with many.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from warm.processes import run

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmarks/deaths.py"


def test_a_process_of_two_samplers_dies_and_then_a_rank_that_trains(tmp_path: Path) -> None:
    """Both samplers are named and replaced, every group is trained once with all its samples, the lost rank is named and ends the
    run with exit code 3, and no process or file stays."""
    how = "--workers 2 --samplers 6 --light 2 --kills 1 --every 1 --samples 48 --tokens 96"
    done = run([sys.executable, SCRIPT, *how.split()], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    lines = done.stdout.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    killed, found = rows[2], dict(row for row in rows[3:] if len(row) == 2)
    assert killed[2] == "2" and killed[3].startswith("rollout rank ") and killed[6] == "6", said
    assert found["exit code after the death of trainer rank 1, named"] == "3", said
    assert found["samplers lost, joined"] == "2, 8" and found["left behind"] == "nothing", said
    assert found["groups trained once, with all samples"] == "yes", said
