"""No golden case goes unused."""

from __future__ import annotations

import ast
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
FILES = sorted(path.name for path in (HERE / "data").glob("*.json"))


@cache
def calls(name: str) -> list[list[str]]:
    """The arguments of every call of ``name`` in this folder's tests, where they are texts."""
    nodes = [node for path in HERE.glob("test_*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    found = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == name]
    return [[one.value for one in node.args if isinstance(one, ast.Constant)] for node in found]


def is_run(file: str, case: dict[str, Any]) -> bool:
    """By a test with the file's marker, which runs all cases or those whose names begin so; or, in balancing, of this kind."""
    if file == "balancing.json":
        return [case["params"]["kind"]] in calls("of_kind")
    prefixes = [prefixes for marked, *prefixes in calls("pytest.mark.golden") if marked == file]
    return any(not each or case["name"].startswith(tuple(each)) for each in prefixes)


@pytest.mark.parametrize("file", FILES)
def test_every_case_is_run(file: str) -> None:
    cases = json.loads((HERE / "data" / file).read_text(encoding="utf-8"))["cases"]
    assert [case["name"] for case in cases if not is_run(file, case)] == []
    assert len({case["name"] for case in cases}) == len(cases) > 0


def test_a_case_that_nobody_asks_for_would_be_found() -> None:
    assert not is_run("kl_control.json", {"name": "another"})
    assert not is_run("balancing.json", {"name": "partition_0", "params": {"kind": "another"}})
