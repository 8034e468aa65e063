"""metrics.jsonl: one JSON object per step, read by reports and comparisons."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from posttrain.config import TrainingConfig
from posttrain.errors import RunStopped
from posttrain.libraries.disk_errors import naming
from posttrain.registry import TRACKERS
from posttrain.run.record import read_metrics


@TRACKERS.register("jsonl")
class Jsonl:
    """Writes ``folder/metrics.jsonl``, flushed after each step.

    Strict JSON: a non-finite number is written as null and its name is added to the list ``nonfinite``.
    """

    def __init__(self, folder: Path):
        self.path = Path(folder) / "metrics.jsonl"
        self._file: TextIO | None = None

    def begin(self, config: TrainingConfig, total_steps: int, first_step: int) -> None:
        """Open the file. A run that resumes at ``first_step`` > 1 keeps the lines of earlier steps and drops the others, which it
        will write again; a run that starts at 1 starts a new file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [line for step, line in read_metrics(self.path).rows if step < first_step] if first_step > 1 else []
        # Written to a temporary file and renamed: a killed process leaves either the old file or the new one.
        beside = self.path.with_name(self.path.name + ".new")
        with naming(self.path):
            with beside.open("w", encoding="utf-8") as file:
                file.writelines(lines)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self.path)
            self._file = self.path.open("a", encoding="utf-8")

    def phase(self, name: str, step: int, total: int | None = None) -> None:
        """No-op: only finished steps are written."""

    def advance(self, units: int) -> None:
        """No-op: only finished steps are written."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the line of one step.

        Raises: RuntimeError before ``begin`` and after ``close``; RunStopped where the file is gone.
        """
        if self._file is None:
            raise RuntimeError("metrics.jsonl is not open: log() belongs between begin() and close()")
        with naming(self.path):
            self._file.write(metrics_line(step, metrics))
            self._file.flush()
            os.fsync(self._file.fileno())  # a checkpoint of this step must not outlive its metrics
            if not self.path.exists():  # what is written into a deleted file is lost in silence
                raise RunStopped(
                    f"{self.path} is gone: it, or its folder, was moved or deleted while the run was writing it. "
                    "Put the folder back to resume from its last checkpoint"
                )

    def message(self, text: str) -> None:
        """No-op: metrics.jsonl holds numbers only."""

    def close(self) -> None:
        """Close the file. What a full disk has not taken was reported by ``log``."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None


def metrics_line(step: int, metrics: Mapping[str, float]) -> str:
    """Format one line of metrics.jsonl, with its newline; the same metrics give the same bytes."""
    numbers = {name: float(value) if not isinstance(value, int) else value for name, value in metrics.items()}
    nonfinite = sorted(name for name, value in numbers.items() if not math.isfinite(value))
    line: dict[str, object] = {"step": step, **numbers}
    if nonfinite:
        line |= dict.fromkeys(nonfinite) | {"nonfinite": nonfinite}
    return json.dumps(line, sort_keys=True, allow_nan=False) + "\n"
