"""What the report and the console show is in the glossary."""

from __future__ import annotations

import re
from pathlib import Path

from posttrain.backends.tracking.console import SHOWN
from posttrain.report.html import page_script

GLOSSARY = Path(__file__).parents[3] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)


def test_glossary_has_every_metric_that_is_shown() -> None:
    runs, tuning = GLOSSARY.read_text(encoding="utf-8").split("## Supervised fine-tuning")
    documented = ROW.findall(runs)
    assert len(documented) == len(set(documented)) > 40
    assert len(ROW.findall(tuning)) == len(set(ROW.findall(tuning))) > 10  # some names are in both
    script = page_script()
    in_charts = re.findall(r'\["([a-z]+/[a-z_0-9]+)"', script)
    (phases,) = re.findall(r"PHASES = \[(.*)\]", script)
    in_time = [f"time/{phase}_s" for phase in re.findall(r'"(\w+)"', phases)]
    assert len(in_charts) >= 16 and len(in_time) == 10
    shown = {*in_charts, *in_time, *(name for _, name in SHOWN)}
    assert shown - {*documented, *ROW.findall(tuning)} == set()


def test_glossary_rows_are_complete() -> None:
    rows = [line for line in GLOSSARY.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 5, row
        assert all(cells), row  # name, unit, formula, what is healthy, what to do when it is not
