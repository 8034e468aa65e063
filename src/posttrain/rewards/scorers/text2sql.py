"""SkyRL's text2sql: the rows of the answer's query are those of the reference's, asked of a real sqlite database in a box."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.reward import RewardFn
from posttrain.records.prompts import Prompt
from posttrain.registry import REWARDS
from posttrain.rewards.options import OWN_SHARE, RunWide, too_slow
from posttrain.rewards.spans import spans
from posttrain.sandbox.boxes import Program, Run, run
from posttrain.sandbox.layers import walls_for
from posttrain.sandbox.walls import Limits

# Where each collection keeps its databases, below db_path.
FOLDERS = {"synsql": "SynSQL-2.5M/databases", "spider": "spider/database", "bird": "bird/train/train_databases"}
_LONGEST_S = 30.0  # SkyRL's limit
_TAG_INSIDE = re.compile(r"</?(?:think|sql|observation)\b")
# Runs in the box. Read-only and immutable: it needs no lock file beside the database. Bytes become a pair that JSON can hold.
_QUERY = """
import json, sqlite3, sys, urllib.parse
path, sql = json.load(sys.stdin)
database = sqlite3.connect(f"file:{urllib.parse.quote(path)}?mode=ro&immutable=1", uri=True)
database.text_factory = lambda raw: raw.decode("utf-8", "replace")
rows = {tuple(row) for row in database.execute(sql)}
json.dump([[["bytes", cell.hex()] if isinstance(cell, bytes) else cell for cell in row] for row in rows], sys.stdout)
"""


@REWARDS.register("text2sql")
def text2sql(*, db_path: str = "", timeout_s: float | None = None, run_wide: RunWide | None = None) -> RewardFn:
    """A reward of 1 when both queries give the same set of rows, 0 when not or when the answer's query fails, -1 when the
    response does not have the form. The row's extra_info holds ``db_id`` and ``data`` (synsql, spider or bird).

    Args: ``db_path`` is the folder that holds the collections; ``timeout_s`` is for each of the two queries; null is 30, or
        40 % of reward.timeout_s where that is less.
    Raises: ConfigError without db_path, and when this machine cannot box a query in.
    """
    run_wide, problems = run_wide or RunWide(), []
    if not db_path or not Path(db_path).is_dir():
        what = f"there is no folder {db_path}" if db_path else "text2sql needs db_path, the folder of its databases"
        problems.append(Problem(what, fix="set the option db_path of the reward", field="options.db_path"))
    if timeout_s is not None and timeout_s <= 0:
        problems.append(Problem(f"timeout_s is {timeout_s}; use more than 0", field="options.timeout_s"))
    problems += too_slow("timeout_s", 2 * (timeout_s or 0.0), run_wide)
    if problems:
        raise ConfigError(problems)
    walls = walls_for("the reward text2sql", allow_unboxed=run_wide.allow_unboxed_code)
    timeout_s = timeout_s or min(_LONGEST_S, OWN_SHARE / 2 * run_wide.timeout_s)
    return functools.partial(_score, db_path=Path(db_path).resolve(), limits=Limits(timeout_s=timeout_s), walls=walls)


def _score(prompt: Prompt, response: str, *, db_path: Path, limits: Limits, walls: Sequence[str]) -> float:
    """Raises: ValueError when the row names no database, there is none of this name, or the reference's own query fails;
    BoxError when a box could not be made."""
    if not isinstance(prompt.ground_truth, str) or not prompt.ground_truth.strip():
        raise ValueError(f"the ground truth is {prompt.ground_truth!r}; text2sql needs a query")
    file = _database(prompt, db_path)
    query = solution(response)
    if query is None:
        return -1.0
    wanted = _wanted(file, prompt.ground_truth, limits, tuple(walls))
    answer = _ask(file, query, limits, walls)
    return float(answer.finished and _rows(answer) == wanted)


def solution(response: str) -> str | None:
    """The query of a response that has the form: one <solution>…</solution> without other tags inside, at least one
    <think>…</think>, and after every observation more thinking. None otherwise."""
    found = spans(response, "<solution>", "</solution>")
    if response.count("<solution>") != 1 or response.count("</solution>") != 1 or len(found) != 1:
        return None
    thinks = bool(spans(response, "<think>", "</think>"))
    goes_on = all(part.lstrip().startswith("<think>") for part in response.split("</observation>")[1:])
    return found[0].strip() if thinks and goes_on and not _TAG_INSIDE.search(found[0]) else None


def _database(prompt: Prompt, db_path: Path) -> Path:
    name, collection = prompt.extra_info.get("db_id"), prompt.extra_info.get("data")
    if collection not in FOLDERS:
        raise ValueError(f"extra_info has data {collection!r}; {', '.join(FOLDERS)} are known")
    if not isinstance(name, str) or Path(name).name != name:
        raise ValueError(f"extra_info has db_id {name!r}; the name of a database is expected")
    file = db_path / FOLDERS[collection] / name / f"{name}.sqlite"
    if not file.is_file():
        raise ValueError(f"there is no database {file}")
    return file


@functools.lru_cache(maxsize=16)  # every response of a group asks for the same ones
def _wanted(file: Path, query: str, limits: Limits, walls: tuple[str, ...]) -> frozenset[Any]:
    reference = _ask(file, query, limits, walls)
    if not reference.finished:
        raise ValueError(f"the reference's query fails: {reference.why()}")
    return _rows(reference)


def _ask(file: Path, query: str, limits: Limits, walls: Sequence[str]) -> Run:
    given = json.dumps([str(file), query])
    return run(Program(source=_QUERY, stdin=given, readable=(str(file),)), limits, walls)


def _rows(done: Run) -> frozenset[Any]:
    return frozenset(
        tuple(tuple(cell) if isinstance(cell, list) else cell for cell in row) for row in json.loads(done.stdout)
    )
