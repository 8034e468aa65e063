"""examples/reward_model_to_ppo.py at its smallest: from pairs to a policy, resumed without work the second time."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from warm.processes import run

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_whole_way_from_pairs_to_a_policy(tmp_path: Path) -> None:
    command = [sys.executable, "examples/reward_model_to_ppo.py", str(tmp_path), "--seeds", "1"]
    tables = [
        run(
            [*command, "--pairs", "64", "--steps", "1"],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    assert tables[0] == tables[1]
    (row,) = re.findall(r"^\| 1 \| (.*) \|$", tables[0], re.MULTILINE)
    ordered, score, digits = row.split(" | ")
    assert 0 <= float(ordered) <= 1 and all(0 <= float(part) <= 1 for part in digits.split(" → "))
    assert len(score.split(" → ")) == 2
