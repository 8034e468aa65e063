"""Reading of a run folder: finished, active, or killed in the middle of a line."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from posttrain.errors import Problem, RequestError
from posttrain.libraries import json_text, yaml_text

SAMPLES_FILE = re.compile(r"step_(\d+)\.jsonl")
MAX_PHASES = 3000  # per timeline
OVERALL = "validation/accuracy"  # of all held-out questions together
ACCURACY = re.compile(r"validation/(.+)/accuracy")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """The record of a run in its folder. Sample files are listed here and read on demand: they may be large."""

    folder: Path
    info: Mapping[str, Any]  # run.json: name, started, versions, device, total_steps, status
    config_text: str  # config.yaml, as it stands
    config: Mapping[str, Any]  # the same, parsed
    metrics: Mapping[int, Mapping[str, float | None]]  # step -> metric -> value; None was not finite; steps ascending
    samples: Mapping[int, Path]  # step -> samples/step_N.jsonl
    validation: Mapping[int, Path]  # step -> validation/step_N.jsonl; step 0 is the starting weights
    notes: tuple[str, ...]  # about files that could not be read

    @property
    def name(self) -> str:
        return str(self.info.get("name") or self.folder.resolve().name)

    @property
    def model(self) -> str:
        """Folder or hub id of the model; empty when the configuration names none."""
        section = self.config.get("model")
        return str(section.get("path") or "") if isinstance(section, dict) else ""

    @property
    def steps_done(self) -> int:
        return max(self.metrics, default=0)

    def series(self, metric: str) -> dict[int, float | None]:
        """Return step -> value, for the steps that logged this metric."""
        return {step: values[metric] for step, values in self.metrics.items() if metric in values}

    def metric_names(self) -> list[str]:
        """Return every logged metric, sorted."""
        return sorted({name for values in self.metrics.values() for name in values})

    def data_sources(self) -> list[str]:
        """Return the data sources with a held-out accuracy, sorted."""
        return [match[1] for name in self.metric_names() if (match := ACCURACY.fullmatch(name))]

    def accuracy(self, step: int) -> float | None:
        """Return the accuracy of all held-out questions at a step. A run of an earlier version with several sources has none:
        the mean of their accuracies would be another number."""
        found = self.metrics.get(step, {})
        sources = self.data_sources()
        return found.get(OVERALL, found.get(f"validation/{sources[0]}/accuracy") if len(sources) == 1 else None)


def read_run(folder: Path) -> RecordedRun:
    """Read a run folder.

    An incomplete last line is ignored; other unreadable content becomes a note, so that a damaged run still has a report. Lines
    about the same step are merged.

    Raises: RequestError when the folder does not exist or is not a run folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        what = "is a file, not a run folder" if folder.exists() else "does not exist"
        raise RequestError(Problem(f"{folder} {what}", fix="name the folder that a run was written to (run.folder)"))
    if not (folder / "metrics.jsonl").is_file():
        inside = sorted(path.parent.name for path in folder.glob("*/metrics.jsonl"))
        raise RequestError(
            Problem(
                "this is not a run folder: there is no metrics.jsonl in it",
                where=str(folder),
                fix=f"did you mean {folder / inside[0]}?" if inside else "name the folder that holds metrics.jsonl",
            )
        )
    notes: list[str] = []
    text = _text(folder / "config.yaml", notes)
    return RecordedRun(
        folder=folder,
        info=_mapping(folder / "run.json", _text(folder / "run.json", notes), notes),
        config_text=text,
        config=_mapping(folder / "config.yaml", text, notes),
        metrics=_metrics(folder / "metrics.jsonl", notes),
        samples=_sample_files(folder / "samples"),
        validation=_sample_files(folder / "validation"),
        notes=tuple(notes),
    )


def json_rows(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file. An invalid line becomes a note, unless it is a last line without a newline: that
    one is still being written, or its writer was killed."""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json_text.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                yield row
            elif line.strip() and line.endswith("\n"):
                notes.append(f"{path.parent.name}/{path.name}, line {number}, is not a JSON object and was ignored.")


def token_rows(samples: Path) -> tuple[dict[str, str], dict[int, list[dict[str, Any]]]]:
    """Read step_N.tokens.jsonl, the token values of step_N.jsonl. Returns: the text of every token id; and by number of the
    sample (from 0) its rows, each with a list of ``token_ids``. Both are empty without such a file."""
    path = samples.with_suffix(".tokens.jsonl")
    texts: dict[str, str] = {}
    rows: dict[int, list[dict[str, Any]]] = {}
    for row in json_rows(path, []) if path.is_file() else ():
        if isinstance(row.get("texts"), dict):
            texts |= {str(key): str(text) for key, text in row["texts"].items()}
        elif isinstance(row.get("line"), int) and isinstance(row.get("token_ids"), list):
            rows.setdefault(row["line"], []).append(row)
    return texts, rows


def read_timeline(folder: Path, last: int = MAX_PHASES) -> list[tuple[int, str, float, float, str]]:
    """Return (step, phase, start, end, lane) of the last phases in timeline.jsonl, in seconds since some fixed time, in order of
    their starts; "" is the lane of the loop itself. Empty without such a file."""
    path = folder / "timeline.jsonl"
    found: deque[tuple[int, str, float, float, str]] = deque(maxlen=last)
    for row in json_rows(path, []) if path.is_file() else ():
        start, end = _number(row.get("start_s")), _number(row.get("end_s"))
        if isinstance(row.get("step"), int) and start is not None and end is not None and end >= start:
            found.append((row["step"], str(row.get("phase")), start, end, str(row.get("lane") or "")))
    return sorted(found, key=lambda phase: phase[2])


def _metrics(path: Path, notes: list[str]) -> dict[int, dict[str, float | None]]:
    merged: dict[int, dict[str, float | None]] = {}
    for row in json_rows(path, notes):
        step = row.pop("step", None)
        if isinstance(step, int):
            row.pop("nonfinite", None)
            merged.setdefault(step, {}).update({name: _number(value) for name, value in row.items()})
    return dict(sorted(merged.items()))


def _number(value: object) -> float | None:
    """Return the number; None for null, NaN (which another writer may leave) and other values."""
    number = isinstance(value, (int, float)) and math.isfinite(value)
    return float(value) if number else None  # type: ignore[arg-type]


def _sample_files(folder: Path) -> dict[int, Path]:
    found = {int(match[1]): path for path in folder.glob("*.jsonl") if (match := SAMPLES_FILE.fullmatch(path.name))}
    return dict(sorted(found.items()))


def _text(path: Path, notes: list[str]) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        notes.append(f"{path.name} is missing.")
        return ""


def _mapping(path: Path, text: str, notes: list[str]) -> dict[str, Any]:
    """Parse a YAML or JSON object (JSON is parsed faster, and may hold tabs); {} and a note when invalid."""
    if not text:
        return {}
    try:
        value = json_text.loads(text) if path.suffix == ".json" else yaml_text.safe_load(text)
    except (ValueError, yaml.YAMLError):
        value = None
    if isinstance(value, dict):
        return value
    notes.append(f"{path.name} could not be read.")
    return {}
