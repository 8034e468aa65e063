"""RUN_DIR/timeline.jsonl: when every phase of every step began and ended."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Timeline:
    """Appends a line per phase, ``{"step": 3, "phase": "update", "start_s": ..., "end_s": ...}``, in seconds of Unix time, in
    the order in which phases ended: those of ``time/<phase>_s``, and ``checkpoint`` (where it is written in the background,
    its beginning). A phase that a step had twice (a rollout that is refilled) has two lines. Phases
    overlap only where a line names a ``lane``, which is another one than the loop's own. Step 0 is
    the validation of the starting weights.

    A resumed run drops the lines of the steps that it makes again, as metrics.jsonl does. A disk that takes no more lines is
    reported to ``say`` once, and ends the file, not the run.

    Args: saved_s, the time at which the checkpoint that a run resumes from was whole, if it was saved here. A run that was killed
        right then has not written its line, and it is added.
    """

    def __init__(self, folder: Path, first_step: int, say: Callable[[str], None], saved_s: float | None = None):
        self._path = folder / "timeline.jsonl"
        self._say = say
        self._open = True
        rows = self._rows_before(first_step) if first_step > 1 else []
        if saved_s is not None and not any(
            row["step"] == first_step - 1 and row["phase"] == "checkpoint" for row in rows
        ):
            ends = [float(row["end_s"]) for row in rows if row["step"] == first_step - 1]
            start_s = min([saved_s, max(ends, default=saved_s)])
            rows.append(_row(first_step - 1, "checkpoint", start_s, saved_s))
        self._write("".join(json.dumps(row) + "\n" for row in rows), anew=True)

    def add(self, step: int, phase: str, start_s: float, end_s: float, *, lane: str | None = None) -> None:
        line = _row(step, phase, start_s, end_s) | ({} if lane is None else {"lane": lane})
        self._write(json.dumps(line) + "\n")

    def _rows_before(self, first_step: int) -> list[dict[str, Any]]:
        """The rows of steps below ``first_step``; one that was half-written when a run was killed is dropped."""
        kept = []
        try:
            text = self._path.read_text(encoding="utf-8", errors="replace") if self._path.exists() else ""
        except OSError as error:
            self._say(f"timeline.jsonl begins again, because it cannot be read: {error.strerror}")
            return []
        for line in text.splitlines():
            try:
                row = json.loads(line)
                whole = row["step"] < first_step and isinstance(row["phase"], str) and row["start_s"] <= row["end_s"]
            except (ValueError, TypeError, KeyError):
                continue
            if whole:
                kept.append(row)
        return kept

    def _write(self, text: str, *, anew: bool = False) -> None:
        if not self._open:
            return
        try:
            if anew:
                beside = self._path.with_name(self._path.name + ".new")
                beside.write_text(text, encoding="utf-8")
                os.replace(beside, self._path)
            else:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(text)
        except OSError as error:
            self._open = False
            self._say(f"timeline.jsonl ends here, because it cannot be written: {error.strerror}")


def _row(step: int, phase: str, start_s: float, end_s: float) -> dict[str, Any]:
    return {"step": step, "phase": phase, "start_s": round(start_s, 4), "end_s": round(end_s, 4)}
