"""Tasks made from built-in repositories: a bug in one of their modules that their tests find, drawn by the episode's seed."""

from __future__ import annotations

import importlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from posttrain.data.episodes import FIRST_TRAINING_SEED
from posttrain.envs.repair.checkout import Box
from posttrain.envs.repair.mutations import bugs_of, plainly
from posttrain.envs.repair.tasks import Case, Kind, RepairTask

FOLDER = Path(__file__).with_name("repositories")
HELD_OUT = ("league", "planner", "roman")  # of validation; training never sees them
_CASES = "_cases.py"
_ENDLESS_S = 1.0  # the tests take milliseconds; a bug that makes them take longer is taken for an endless loop


def names() -> list[str]:
    """Return all built-in repositories."""
    return sorted(path.parent.name for path in FOLDER.glob(f"*/{_CASES}"))


def drawn(seed: int, kinds: Sequence[Kind], box: Box) -> RepairTask:
    """Return the task of a seed. Training's seeds have other repositories than validation's. Raises: BoxError."""
    training = seed >= FIRST_TRAINING_SEED
    draws = random.Random(f"repair/{seed}")
    known = [name for name in names() if (name in HELD_OUT) != training]
    while True:
        name = draws.choice(known)
        found = places(name, tuple(kinds))
        if found and (task := task_at(name, tuple(kinds), draws.randrange(len(found)), box)):
            return task


@lru_cache(maxsize=64)
def places(name: str, kinds: tuple[Kind, ...]) -> list[tuple[Kind, str, str]]:
    """Return every bug that a repository can have: its kind, the file and the file's text."""
    return [(kind, path, text) for path, right in files_of(name).items() for kind, text in bugs_of(right, kinds)]


@lru_cache(maxsize=4096)
def task_at(name: str, kinds: tuple[Kind, ...], number: int, box: Box) -> RepairTask | None:
    """Return a task, or None for a bug that the visible tests do not find, or that they do not end with. Raises: BoxError."""
    kind, path, text = places(name, kinds)[number]
    tests, hidden = right_cases(name, box)
    files = {**files_of(name), path: text}
    quick = Box(replace(box.limits, timeout_s=min(box.limits.timeout_s, _ENDLESS_S)), box.walls)
    outcomes = quick.outcomes(files, tests)
    failed = [not case.passed(outcome) for case, outcome in zip(tests, outcomes, strict=True)]
    if not any(failed) or any(outcome.get("error") == "" for outcome in outcomes):
        return None
    return RepairTask(name=f"{name}/{number}", files=files, tests=tests, hidden=hidden, kind=kind)


@lru_cache(maxsize=64)
def files_of(name: str) -> Mapping[str, str]:
    """Return the right repository, without its cases."""
    found = sorted(path for path in (FOLDER / name).glob("*.py") if path.name != _CASES)
    return {f"{name}/{path.name}": plainly(path.read_text(encoding="utf-8")) for path in found}


@lru_cache(maxsize=64)
def right_cases(name: str, box: Box) -> tuple[tuple[Case, ...], tuple[Case, ...]]:
    """Return the visible and the hidden tests: other arguments each, with what the right repository makes of them."""
    calls_of = importlib.import_module(f"{__package__}.repositories.{name}._cases").calls
    both = []
    for part in ("visible", "hidden"):
        asked = [
            Case(f"{name}.{call}", tuple(arguments)) for call, arguments in calls_of(random.Random(f"{part}/{name}"))
        ]
        outcomes = box.outcomes(files_of(name), asked)
        both.append(
            tuple(
                Case(case.call, case.arguments, outcome.get("value"), outcome.get("error", ""))
                for case, outcome in zip(asked, outcomes, strict=True)
            )
        )
    return both[0], both[1]
