"""SkyRL's text2sql: both queries, run on an sqlite database in a sandbox, return the same rows."""

from __future__ import annotations

import functools
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
from posttrain.sandbox.layers import walls_for
from posttrain.sandbox.queries import all_rows, rows_of
from posttrain.sandbox.walls import BoxLimits

# Where each collection keeps its databases, below db_path.
FOLDERS = {"synsql": "SynSQL-2.5M/databases", "spider": "spider/database", "bird": "bird/train/train_databases"}
_LONGEST_S = 30.0  # SkyRL's limit
# SkyRL ignores the case of these three, and not that of <solution> and of the first thought.
_TAG_INSIDE = re.compile(r"</?(?:think|sql|observation)\b", re.IGNORECASE)
_OBSERVED = re.compile(r"</observation>", re.IGNORECASE)
_THINKS_NEXT = re.compile(r"\s*<think>", re.IGNORECASE)


@REWARDS.register("text2sql", runs_code=True)
def text2sql(*, db_path: str = "", timeout_s: float | None = None, run_wide: RunWide | None = None) -> RewardFn:
    """A reward of 1 when both queries return the same set of rows, 0 when they differ or the answer's query fails, -1 for a
    response in the wrong format. The row's extra_info holds ``db_id`` and ``data`` (synsql, spider or bird).

    Args: ``db_path`` is the folder that holds the collections; ``timeout_s`` is the limit of each query; null is 30, or
        40 % of reward.timeout_s where that is less.
    Raises: ConfigError without db_path, and on a machine without a sandbox.
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
    return functools.partial(
        _score, db_path=Path(db_path).resolve(), limits=BoxLimits(timeout_s=timeout_s), walls=walls
    )


def _score(prompt: Prompt, response: str, *, db_path: Path, limits: BoxLimits, walls: Sequence[str]) -> float:
    """Raises: ValueError when the row names no database or a missing one, or the reference's own query fails; BoxError when a
    sandbox cannot be created."""
    if not isinstance(prompt.ground_truth, str) or not prompt.ground_truth.strip():
        raise ValueError(f"the ground truth is {prompt.ground_truth!r}; text2sql needs a query")
    file = _database(prompt, db_path)
    query = solution(response)
    if query is None:
        return -1.0
    wanted = _wanted(file, prompt.ground_truth, limits, tuple(walls))
    answer = all_rows(file, query, limits, walls)
    return float(answer.finished and rows_of(answer) == wanted)


def solution(response: str) -> str | None:
    """Return the query of a response in the right format, else None.

    The format is one <solution> and one </solution> after it, without other tags between, at least one <think>…</think>, and
    after every observation before the solution more thinking.
    """
    before, opening, after = response.partition("<solution>")
    query, closing, rest = after.partition("</solution>")
    once = opening and closing and "<solution>" not in after and "</solution>" not in rest
    if not once or _TAG_INSIDE.search(query) or not spans(response, "<think>", "</think>"):
        return None
    if not all(_THINKS_NEXT.match(before, observed.end()) for observed in _OBSERVED.finditer(before)):
        return None
    return query.strip()


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


@functools.lru_cache(maxsize=16)  # the responses of a group share it
def _wanted(file: Path, query: str, limits: BoxLimits, walls: tuple[str, ...]) -> frozenset[Any]:
    reference = all_rows(file, query, limits, walls)
    if not reference.finished:
        raise ValueError(f"the reference's query fails: {reference.why()}")
    return rows_of(reference)
