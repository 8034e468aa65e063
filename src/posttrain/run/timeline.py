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
    """

    def __init__(self, folder: Path, first_step: int, say: Callable[[str], None]):
        self._path = folder / "timeline.jsonl"
        self._say = say
        self._open = True
        before = _lines_before(self._path, first_step) if first_step > 1 else ""
        self._write(before, anew=True)

    def add(self, step: int, phase: str, start_s: float, end_s: float, *, lane: str | None = None) -> None:
        line: dict[str, Any] = {"step": step, "phase": phase, "start_s": round(start_s, 4), "end_s": round(end_s, 4)}
        if lane is not None:
            line["lane"] = lane
        self._write(json.dumps(line) + "\n")

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


def _lines_before(path: Path, first_step: int) -> str:
    """The lines of steps below ``first_step``; one that was half-written when a run was killed is dropped."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int) and row["step"] < first_step:
            kept.append(line + "\n")
    return "".join(kept)
