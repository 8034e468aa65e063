"""The record of a run's steps: the rows of metrics.jsonl, rows that are lost, and records kept when a run starts over."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.libraries.disk_errors import naming

METRICS = "metrics.jsonl"
# What the steps of a run leave in its folder, besides checkpoints.
RECORDS = (METRICS, "timeline.jsonl", "run.json", "config.yaml", "samples", "validation", "batches")


@dataclass(frozen=True, slots=True)
class Metrics:
    """The readable lines of a metrics.jsonl, with their newlines, and the number of the others."""

    rows: list[tuple[int, str]]  # step, line
    damaged: int  # besides a last line that a killed process left half-written


def read_metrics(path: Path) -> Metrics:
    """Read a metrics.jsonl; one that does not exist has no rows."""
    with naming(path):
        lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    rows, damaged = [], 0
    for number, line in enumerate(lines):
        try:
            text = line.decode("utf-8")
            row = json.loads(text)
            rows.append((_step(row), text + "\n"))
        except (ValueError, TypeError):
            damaged += bool(line) and number < len(lines) - 1
    return Metrics(rows, damaged)


def _step(row: Any) -> int:
    step = row["step"] if isinstance(row, dict) and "step" in row else None
    if not isinstance(step, int) or isinstance(step, bool):
        raise ValueError("no row of a step")
    return step


def steps_on_record(folder: Path, about: Mapping[str, Any]) -> int:
    """The last step that a run folder knows of, 0 for none. ``about`` is its run.json.

    A damaged line of metrics.jsonl, whose step is unknown, counts as a first step.
    """
    metrics = read_metrics(folder / METRICS)
    known = [step for step, _ in metrics.rows] + [1] * bool(metrics.damaged)
    known += [int(one["first_step"]) - 1 for one in about.get("resumes", [])]
    if saved := about.get("last_checkpoint"):
        known.append(int(str(saved).rpartition("_")[2]))
    return max(known, default=0)


def lost_rows(folder: Path, first: int, last: int) -> list[str]:
    """Texts about rows of the steps from ``first`` to ``last`` that metrics.jsonl does not hold any more. A damaged file is
    kept beside: the one that a resumed run writes holds its readable rows alone."""
    path = folder / METRICS
    metrics = read_metrics(path)
    there = {step for step, _ in metrics.rows}
    missing = [step for step in range(first, last + 1) if step not in there]
    texts = []
    if metrics.damaged:
        kept = _free(folder, "metrics.damaged_{}.jsonl")
        with naming(kept):
            shutil.copyfile(path, kept)
        lines = "line" if metrics.damaged == 1 else "lines"
        texts.append(f"{path} has {metrics.damaged} damaged {lines}; it is kept as {kept.name}")
    if missing:
        what = "lacks" if path.exists() else "is gone, and with it"
        texts.append(f"{path} {what} the rows of {_ranges(missing)}; these steps are done, and are not made again")
    return texts


def keep_aside(folder: Path) -> Path:
    """Move the records of a run that starts over into a folder earlier_N in its run folder, which is returned."""
    aside = _free(folder, "earlier_{}")
    aside.mkdir()
    for name in RECORDS:
        if (folder / name).exists():
            os.replace(folder / name, aside / name)
    return aside


def _free(folder: Path, pattern: str) -> Path:
    number = 1
    while (path := folder / pattern.format(number)).exists():
        number += 1
    return path


def _ranges(steps: Iterable[int]) -> str:
    """``step 3``, ``steps 1 to 4, 7``."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    texts = [f"{a}" if a == b else f"{a} to {b}" for a, b in runs]
    shown = texts if len(texts) <= 6 else [*texts[:6], f"and {len(texts) - 6} more"]
    return f"{'step' if texts == [texts[0]] and runs[0][0] == runs[0][1] else 'steps'} {', '.join(shown)}"
