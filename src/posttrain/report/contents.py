"""The contents of a page about runs, as plain values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from posttrain.report.differences import differences
from posttrain.report.embedded import embed_samples
from posttrain.report.harmless import finite
from posttrain.report.read import OVERALL, RecordedRun, json_rows, read_timeline

MAX_NOTES = 20  # most notes about unreadable files


def page_data(runs: Sequence[RecordedRun], *, live: bool = False) -> dict[str, Any]:
    """Collect all data that the page shows about these runs. ``live`` pages request it repeatedly."""
    names = labels(runs)
    notes = [
        f"{name}: {note}" if len(runs) > 1 else note
        for run, name in zip(runs, names, strict=True)
        for note in _notes(run)
    ]
    embedded = embed_samples(runs, names, notes)
    return {
        "live": live,
        "runs": [_run(run, label) for run, label in zip(runs, names, strict=True)],
        "differences": differences([run.config for run in runs]),
        "samples": embedded.samples,
        "token_texts": embedded.token_texts,
        "pictures": embedded.pictures,
        "left_out": embedded.left_out,
        "notes": notes[:MAX_NOTES] + [f"And {len(notes) - MAX_NOTES} more." for _ in notes[MAX_NOTES : MAX_NOTES + 1]],
    }


def labels(runs: Sequence[RecordedRun]) -> list[str]:
    """Return labels that distinguish the runs: their names, else the names of their folders, else numbered names."""
    for found in ([run.name for run in runs], [run.folder.resolve().name for run in runs]):
        if len(set(found)) == len(runs):
            return found
    return [f"{run.name} ({number})" for number, run in enumerate(runs, start=1)]


def _notes(run: RecordedRun) -> list[str]:
    return [*run.notes] + ([] if run.metrics else ["No step has been logged yet."])


def _run(run: RecordedRun, label: str) -> dict[str, Any]:
    steps = list(run.metrics)
    return {
        "name": run.name,
        "label": label,
        "folder": str(run.folder),
        "model": run.model,
        "info": {key: finite(value) for key, value in run.info.items()},
        "steps_done": run.steps_done,
        "headline": _headlines(run),
        "steps": steps,
        "series": {name: [_rounded(run.metrics[step].get(name)) for step in steps] for name in run.metric_names()},
        "nonfinite": {
            name: lost
            for name in run.metric_names()
            if (lost := [step for step, value in run.series(name).items() if value is None])
        },
        "timeline": _timeline(run),
        "asynchronous": _mode(run) not in ("", "off"),
        "config": run.config_text,
    }


def _timeline(run: RecordedRun) -> list[tuple[int, str, float, float, str]]:
    """Return the phases of the run with their lanes, in seconds since the start of the first one recorded."""
    phases = read_timeline(run.folder)
    first = phases[0][2] if phases else 0.0
    return [
        (step, name, round(start - first, 4), round(end - first, 4), lane) for step, name, start, end, lane in phases
    ]


def _mode(run: RecordedRun) -> str:
    """Return asynchronous.mode; "" where the configuration does not say."""
    section = run.config.get("asynchronous")
    return str(section.get("mode") or "") if isinstance(section, dict) else ""


def _headlines(run: RecordedRun) -> list[dict[str, Any]]:
    """Return the held-out accuracies of the head of the page: of all questions together, then of each data source where there are
    several."""
    sources = run.data_sources()
    several = (
        [_headline(run, "all questions", OVERALL, None)] if len(sources) > 1 and OVERALL in run.metric_names() else []
    )
    return [*several, *(_headline(run, source, f"validation/{source}/accuracy", source) for source in sources)]


def _headline(run: RecordedRun, called: str, metric: str, source: str | None) -> dict[str, Any]:
    """Return the first and last value of a held-out accuracy, with the counts behind them; ``source`` None: of all sources."""
    series = [(step, value) for step, value in run.series(metric).items() if value is not None]
    points = [
        {"step": step, "accuracy": value, **_counts(run, step, source, value)}
        for step, value in ([series[0], series[-1]] if len(series) > 1 else series)
    ]
    return {"source": called, "points": points}


def _counts(run: RecordedRun, step: int, source: str | None, accuracy: float) -> dict[str, Any]:
    """Return the number of prompts behind an accuracy, and its 95 % interval; empty when the validation samples were not kept."""
    path = run.validation.get(step)
    prompts = {
        str(row.get("prompt_id"))
        for row in (json_rows(path, []) if path else ())
        if source in (None, row.get("data_source"))
    }
    return {"prompts": len(prompts), "interval": wilson_interval(accuracy, len(prompts))} if prompts else {}


def wilson_interval(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Return the interval that covers the true share with 95 % confidence, for ``share`` of ``count`` independent trials.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
    """
    share = min(max(share, 0.0), 1.0)
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def _rounded(value: float | None) -> float | None:
    """Round to six significant digits: more than a curve shows, in half the bytes."""
    return None if value is None else float(f"{value:.6g}")
