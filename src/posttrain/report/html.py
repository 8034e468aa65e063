"""RUN_DIR/report.html: one page comparing runs, which needs no network.

Text from a model is data: it is embedded as escaped JSON and shown as text only (script/ never sets HTML), and the page's
security policy allows only its own script and style.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.errors import Problem, RequestError
from posttrain.libraries.disk_errors import naming
from posttrain.libraries.folders import make_folder
from posttrain.report.contents import page_data
from posttrain.report.evaluation import is_evaluation
from posttrain.report.harmless import embed, source_hash
from posttrain.report.read import RecordedRun, read_run

MAX_RUNS = 8  # per page: its number of colours
# Names of script/*.js, in loading order.
SCRIPTS = ("text", "charts", "curves", "time", "diff", "tokens", "samples", "main")


def write_report(run_dirs: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report of these run folders, by default report.html in the first one. Returns: its path.

    Raises: RequestError as ``read_runs``, or when ``out`` is a folder.
    """
    runs = read_runs(run_dirs)
    page = render(page_data(runs), title=title_of(runs))
    out = Path(out) if out is not None else runs[0].folder / "report.html"
    if out.is_dir():
        raise RequestError(Problem(f"{out} is a folder; a report is a file", fix="name a file, such as report.html"))
    make_folder(out.parent)
    beside = out.with_name(out.name + ".new")
    with naming(beside):
        beside.write_text(page, encoding="utf-8")
    beside.replace(out)
    return out


def read_runs(run_dirs: Sequence[Path]) -> list[RecordedRun]:
    """Read run folders. Raises: RequestError with all problems: folders that hold no run or are named twice, and more than
    MAX_RUNS."""
    problems = []
    resolved = [Path(folder).resolve() for folder in run_dirs]
    if len(run_dirs) > MAX_RUNS:
        problems.append(Problem(f"{len(run_dirs)} runs do not fit on one page", fix=f"name at most {MAX_RUNS}"))
    for folder in dict.fromkeys(folder for folder in resolved if resolved.count(folder) > 1):
        problems.append(Problem(f"{folder} is named {resolved.count(folder)} times", fix="name it once"))
    runs = []
    for folder in map(Path, run_dirs):
        if is_evaluation(folder) and not (folder / "metrics.jsonl").exists():
            what = f"{folder} holds an evaluation, which does not go on a page with runs"
            problems.append(Problem(what, fix="name evaluations alone, or runs alone"))
            continue
        try:
            runs.append(read_run(folder))
        except RequestError as error:
            problems += error.problems
    if problems:
        raise RequestError(problems)
    return runs


def title_of(runs: Sequence[RecordedRun]) -> str:
    return f"{' · '.join(dict.fromkeys(run.name for run in runs))} · posttrain"


def render(data: dict[str, Any], title: str) -> str:
    """Render page.html with the style, the script and the data."""
    here = Path(__file__).parent
    style = (here / "page.css").read_text(encoding="utf-8")
    script = page_script()
    policy = (
        f"default-src 'none'; script-src {source_hash(script)}; style-src {source_hash(style)}; "
        "img-src data:; "
        "base-uri 'none'; form-action 'none'" + ("; connect-src 'self'" if data["live"] else "")
    )
    parts = {
        "title": html.escape(re.sub(r"[\x00-\x1f\x7f-\x9f]", "", title)),
        "policy": policy,
        "style": style,
        "script": script,
        "data": embed(data),
    }
    # One pass, so that inserted text is never taken for a placeholder.
    template = (here / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def page_script() -> str:
    """Join the page's scripts, which share one scope that is not visible outside."""
    folder = Path(__file__).parent / "script"
    parts = "".join((folder / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}}})();\n'
