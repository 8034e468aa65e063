"""RUN_DIR/report.html: one page that needs no network, with curves, time per phase, samples and the configuration.

What a model wrote is data here: it travels as escaped JSON and reaches the page as text only (page.js never sets HTML),
and the page's security policy allows nothing but its own script and style.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from posttrain.errors import Problem, RequestError
from posttrain.report.read import Run, json_rows, read_run

MAX_SAMPLES = 3000  # samples embedded in a page
MAX_SAMPLE_BYTES = 8_000_000  # of the page that samples may take
MAX_SAMPLES_PER_FILE = 500  # so that one big validation set does not crowd out every other step
MAX_TEXT_CHARS = 20_000  # of one prompt, response or ground truth
MAX_NOTES = 20  # about what could not be read
TEXT_FIELDS = ("prompt", "response", "ground_truth")


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the report of a run folder and return its path, ``run_dir/report.html`` unless ``out`` says otherwise.

    Raises: RequestError when ``run_dir`` is not a run folder, or ``out`` is a folder.
    """
    run = read_run(run_dir)
    page = render(page_data(run), title=f"{run.name} · posttrain")
    out = Path(out) if out is not None else run.folder / "report.html"
    if out.is_dir():
        raise RequestError(
            Problem(f"{out} is a folder, and a report is a file", fix="name a file, such as report.html")
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(out.name + ".new")
    beside.write_text(page, encoding="utf-8")
    beside.replace(out)
    return out


def render(data: dict[str, Any], title: str) -> str:
    """The page: page.html with the style, the script and the data put in."""
    here = Path(__file__).parent
    style = (here / "page.css").read_text(encoding="utf-8")
    script = (here / "page.js").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src {source_hash(script)}; style-src {source_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "title": html.escape(re.sub(r"[\x00-\x1f\x7f-\x9f]", "", title)),
        "policy": policy,
        "style": style,
        "script": script,
        "data": embed(data),
    }
    # One pass, so that nothing put in is taken for a placeholder itself.
    template = (here / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def embed(data: object) -> str:
    """JSON that can stand inside a <script> element: no character in it means anything to HTML. Non-ASCII, U+2028 and lone
    surrogates among it, is written as \\u escapes."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page_data(run: Run) -> dict[str, Any]:
    """Everything the page shows, as plain values."""
    notes = list(run.notes) + ([] if run.metrics else ["No step has been logged yet."])
    samples, left_out = _embedded_samples(run, notes)
    steps = list(run.metrics)
    return {
        "name": run.name,
        "model": run.model,
        "info": {key: _finite(value) for key, value in run.info.items()},
        "steps_done": run.steps_done,
        "headline": [_headline(run, source) for source in run.data_sources()],
        "steps": steps,
        "series": {name: [_rounded(run.metrics[step].get(name)) for step in steps] for name in run.metric_names()},
        "nonfinite": {
            name: [step for step, value in run.series(name).items() if value is None] for name in run.metric_names()
        },
        "samples": samples,
        "left_out": left_out,
        "config": run.config_text,
        "notes": notes[:MAX_NOTES] + [f"And {len(notes) - MAX_NOTES} more." for _ in notes[MAX_NOTES : MAX_NOTES + 1]],
    }


def _headline(run: Run, source: str) -> dict[str, Any]:
    """Held-out accuracy of one data source, first and last, with what it was counted over."""
    series = [(step, value) for step, value in run.series(f"validation/{source}/accuracy").items() if value is not None]
    points = [
        {"step": step, "accuracy": value, **_counts(run, step, source, value)}
        for step, value in ([series[0], series[-1]] if len(series) > 1 else series)
    ]
    return {"source": source, "points": points}


def _counts(run: Run, step: int, source: str, accuracy: float) -> dict[str, Any]:
    """Prompts behind an accuracy, and its 95 % interval; nothing when the validation samples were not kept."""
    path = run.validation.get(step)
    prompts = {
        str(row.get("prompt_id")) for row in (json_rows(path, []) if path else ()) if row.get("data_source") == source
    }
    return {"prompts": len(prompts), "interval": wilson_interval(accuracy, len(prompts))} if prompts else {}


def wilson_interval(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Interval that holds the true share 95 times of 100, for ``share`` of ``count`` independent trials.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
    """
    share = min(max(share, 0.0), 1.0)
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def _embedded_samples(run: Run, notes: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Samples for the page within its limits, and sentences about what was left out.

    Files are taken newest first, then the oldest, then ever finer in between; validation and training in turn.
    """
    validation = [("validation", step, run.validation[step]) for step in spread(run.validation)]
    training = [("training", step, run.samples[step]) for step in spread(run.samples)]
    files = [item for pair in zip_longest(validation, training) for item in pair if item is not None]
    taken: list[dict[str, Any]] = []
    size, whole, cut_files, cut_texts = 0, {"validation": 0, "training": 0}, 0, 0
    for kind, step, path in files:
        rows: list[dict[str, Any]] = []
        for row in json_rows(path, notes):
            row = {key: _finite(value) for key, value in row.items()} | {"kind": kind, "step": step}
            cut_texts += _cut_texts(row)
            length = len(embed(row))
            if len(rows) == MAX_SAMPLES_PER_FILE or len(taken) == MAX_SAMPLES or size + length > MAX_SAMPLE_BYTES:
                cut_files += bool(rows)
                break
            size += length
            rows.append(row)
            taken.append(row)
        whole[kind] += bool(rows)
        if len(taken) == MAX_SAMPLES or size > 0.99 * MAX_SAMPLE_BYTES:
            break
    left_out = []
    for kind, total in (("training", len(run.samples)), ("validation", len(run.validation))):
        if whole[kind] < total:
            left_out.append(f"Samples of {whole[kind]} of {total} {kind} steps are on this page.")
    if cut_files:
        left_out.append(f"Of {cut_files} step{'s' * (cut_files > 1)} only the first samples are here.")
    if cut_texts:
        left_out.append(f"{cut_texts} text{'s' * (cut_texts > 1)} longer than {MAX_TEXT_CHARS} characters were cut.")
    if left_out:
        left_out.append("Everything is in samples/ and validation/ in the run folder.")
    return sorted(taken, key=lambda row: (row["step"], row["kind"])), left_out


def _cut_texts(row: dict[str, Any]) -> int:
    """Shorten the long texts of a row in place; returns how many there were."""
    cut = 0
    for field in TEXT_FIELDS:
        value = row.get(field)
        text = value if isinstance(value, str) or value is None else json.dumps(value, ensure_ascii=False)
        if text is not None and len(text) > MAX_TEXT_CHARS:
            text = f"{text[:MAX_TEXT_CHARS]}… [{len(text) - MAX_TEXT_CHARS} more characters in the run folder]"
            cut += 1
        row[field] = text
    return cut


def spread(steps: Iterable[int]) -> Iterator[int]:
    """All steps: the last, the first, then the middle of each gap, widest gaps first, so that any prefix is evenly spaced."""
    steps = sorted(steps)
    yield from dict.fromkeys(steps[-1:] + steps[:1])
    gaps = [(0, len(steps) - 1)]
    for low, high in gaps:  # grows while it is walked
        if high - low > 1:
            middle = (low + high) // 2
            yield steps[middle]
            gaps += [(low, middle), (middle, high)]


def _finite(value: Any) -> Any:
    """The value with NaN and infinities, which another writer may leave in a file, as texts: JSON has no such numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


def _rounded(value: float | None) -> float | None:
    """Six significant digits: more than a curve shows, in half the bytes."""
    return None if value is None else float(f"{value:.6g}")


def source_hash(text: str) -> str:
    """A source expression that allows exactly this inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
