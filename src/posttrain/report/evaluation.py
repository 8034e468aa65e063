"""One offline page comparing evaluations: tables of metrics with their intervals, and samples.

The page has no script. Text from a model is escaped, and the page's security policy allows only its own style.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from posttrain.errors import Problem, RequestError
from posttrain.libraries import json_text
from posttrain.libraries.disk_errors import naming
from posttrain.libraries.folders import make_folder
from posttrain.report.harmless import source_hash
from posttrain.report.read import json_rows

RESULTS = "results.json"
SAMPLES = "dumped_evals"
MAX_SAMPLES = 200  # per evaluation
MAX_CHARS = 4000  # per text


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    folder: Path
    results: Mapping[str, Any]  # results.json, see run.evaluation

    @property
    def name(self) -> str:
        return str(self.results.get("name") or self.folder.name)

    @property
    def sources(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.results["sources"]
        return found


def is_evaluation(folder: Path) -> bool:
    """Return True when ``posttrain evaluate`` wrote this folder."""
    return (folder / RESULTS).is_file()


def read_evaluation(folder: Path) -> Evaluation:
    """Read an evaluation. Raises: RequestError when the folder holds no readable results."""
    try:
        results = json_text.loads((folder / RESULTS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        what = f"{folder} holds no evaluation: {RESULTS} cannot be read ({error})"
        raise RequestError(Problem(what, fix="name a folder that posttrain evaluate wrote")) from error
    if not isinstance(results, dict) or not isinstance(results.get("sources"), dict):
        raise RequestError(Problem(f"{folder / RESULTS} is not the result of an evaluation"))
    return Evaluation(folder=folder, results=results)


def write_evaluation_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page about these evaluations, by default into the folder of the first.

    Raises: RequestError as ``read_evaluation``.
    """
    evaluations = [read_evaluation(folder) for folder in folders]
    out = out or folders[0] / "report.html"
    if out.is_dir():
        raise RequestError(Problem(f"{out} is a folder; a report is a file", fix="name a file, such as report.html"))
    make_folder(out.parent)
    beside = out.with_name(out.name + ".new")
    with naming(beside):
        beside.write_text(page(evaluations), encoding="utf-8", errors="xmlcharrefreplace")
    beside.replace(out)
    return out


def page(evaluations: Sequence[Evaluation]) -> str:
    style = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    title = " · ".join(evaluation.name for evaluation in evaluations)
    sources = list(dict.fromkeys(source for evaluation in evaluations for source in evaluation.sources))
    parts = [
        f"<header><p class='eyebrow'>posttrain evaluation</p><h1>{_text(title)}</h1>{_facts(evaluations)}</header>",
        *(_table(source, evaluations) for source in sources),
        *(_samples(evaluation) for evaluation in evaluations),
    ]
    policy = f"default-src 'none'; style-src {source_hash(style)}; base-uri 'none'; form-action 'none'"
    return (
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        f"<title>{_text(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )


def _facts(evaluations: Sequence[Evaluation]) -> str:
    rows = [
        f"<div><dt>{_text(evaluation.name)}</dt><dd>{_text(', '.join(map(str, evaluation.results.get('files', []))))}</dd></div>"
        for evaluation in evaluations
    ]
    return f"<dl class='facts'>{''.join(rows)}</dl>"


def _table(source: str, evaluations: Sequence[Evaluation]) -> str:
    """Render a table with a row per metric and a column per evaluation."""
    found = [evaluation.sources.get(source, {}) for evaluation in evaluations]
    names = list(dict.fromkeys(name for one in found for name in one.get("metrics", {})))
    head = "".join(f"<th class='num'>{_text(evaluation.name)}</th>" for evaluation in evaluations)
    counts = "".join(
        f"<td class='num'>{_number(one.get('prompts'))} prompts, {_number(one.get('responses'))} responses</td>"
        if one
        else "<td class='num'>–</td>"
        for one in found
    )
    rows = "".join(
        f"<tr><td>{_text(name)}</td>"
        + "".join(f"<td class='num'>{_value(one.get('metrics', {}).get(name))}</td>" for one in found)
        + "</tr>"
        for name in names
    )
    invalid = "".join(
        f"<p class='hint'>{_text(evaluation.name)}: {_number(_total(one['invalid']))} responses without a score "
        f"({_text(', '.join(f'{reason} {count}' for reason, count in one['invalid'].items()))})</p>"
        for evaluation, one in zip(evaluations, found, strict=True)
        if one.get("invalid")
    )
    majority = "; ".join(dict.fromkeys(str(one["majority"]) for one in found if one.get("majority")))
    return (
        f"<section><h2>{_text(source)}</h2>{invalid}<div class='card scroll'><table><thead><tr><th></th>{head}</tr></thead>"
        f"<tbody><tr><td></td>{counts}</tr>{rows}</tbody></table></div>"
        f"<p class='hint'>In brackets: bootstrap interval over prompts. Majority vote: {_text(majority)}.</p></section>"
    )


def _value(metric: Mapping[str, object] | None) -> str:
    if metric is None:
        return "–"
    interval = f" [{_number(metric['low'])}, {_number(metric.get('high'))}]" if "low" in metric else ""
    return _number(metric.get("value")) + interval


def _number(value: object) -> str:
    """Write a number with four digits, an integer in full; anything else that stands in its place, escaped."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _text(str(value))
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _total(counts: Mapping[str, object]) -> int:
    return sum(count for count in counts.values() if isinstance(count, int))


def _samples(evaluation: Evaluation) -> str:
    rows = list(islice(_rows(evaluation.folder / SAMPLES), MAX_SAMPLES + 1))
    if not rows:
        return ""
    more = f"The first {MAX_SAMPLES}; all are in {SAMPLES}/." if len(rows) > MAX_SAMPLES else ""
    texts = "".join(_sample(row) for row in rows[:MAX_SAMPLES])
    return f"<section><h2>Samples of {_text(evaluation.name)}</h2><p class='hint'>{more}</p>{texts}</section>"


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.jsonl")):
        if path.name != "aggregated_results.jsonl":
            yield from json_rows(path, [])


def _sample(row: Mapping[str, Any]) -> str:
    invalid = row.get("invalid")
    score = f"{row['score']:.4g}" if isinstance(row.get("score"), int | float) else "no score"
    first = " ".join(str(row.get("input_prompt") or row.get("output_response") or "").split())[:90]
    extras = row.get("env_extras")
    parts = {
        "prompt": row.get("input_prompt"),
        "response": row.get("output_response"),
        "answer found": row.get("answer"),
        "expected": extras.get("ground_truth") if isinstance(extras, dict) else None,
        "why it has no score": f"{invalid.get('reason')}: {invalid.get('detail')}"
        if isinstance(invalid, dict)
        else None,
    }
    body = "".join(
        f"<p class='hint'>{name}</p><pre class='card'>{_text(_cut(value))}</pre>"
        for name, value in parts.items()
        if value is not None
    )
    return f"<details><summary>{score} · {_text(first)}</summary>{body}</details>"


def _cut(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}… [{len(text) - MAX_CHARS} more characters]"


def _text(value: str) -> str:
    return html.escape(value.encode("utf-8", "replace").decode())
