"""RUN_DIR/schedule.jsonl: every decision of an asynchronous run, from which it can be replayed."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.run.durable import write_durably


class Schedule:
    """Appends a line per decision: ``{"step": 3, "event": "admitted", "group": 17, ...}``, in the order in which they were made.

    Events: admitted (a group's sampling may begin), cut (the sample stops after so many tokens, until the next step), finished,
    consumed (trained in that step, on samples with this mark), filtered, dropped; order (requests that are sent or cancelled
    after so many passes of the sampler) and rest. Of samplers that work apart, each with a number: joined, order, rest, weights,
    lost; synced (at the end of a step), resumed. Of a resumed run: restarted, recomputed. It drops the lines of the steps that it
    makes again, and of groups that were admitted after its checkpoint, which holds ``admitted`` of them so far.
    Raises: OSError when the disk takes no more: a run that cannot say what it did must not go on as if it could.
    """

    def __init__(self, folder: Path, first_step: int, admitted: int):
        self._path = folder / "schedule.jsonl"
        self._lines: list[str] = []
        self._lock = threading.Lock()  # samplers that work apart decide while the loop writes
        before = lines_before(self._path, first_step, admitted) if first_step > 1 else ""
        write_durably(self._path, before)

    def add(self, event: Mapping[str, Any]) -> None:
        """Take a decision; ``flush`` writes it."""
        line = json.dumps(dict(event), ensure_ascii=False) + "\n"
        with self._lock:
            self._lines.append(line)

    def flush(self) -> None:
        """Write the decisions since the last call, at the end of a step."""
        with self._lock:
            text = "".join(self._lines)
            self._lines.clear()
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)


def lines_before(path: Path, first_step: int, admitted: int) -> str:
    """The lines of steps below ``first_step`` about the first ``admitted`` groups, from 0; one that was half-written when a run
    was killed is dropped."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if not (isinstance(row, dict) and isinstance(row.get("step"), int) and row["step"] < first_step):
            continue
        if row.get("group", -1) < admitted:
            kept.append(line + "\n")
    return "".join(kept)
