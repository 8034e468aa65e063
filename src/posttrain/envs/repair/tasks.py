"""Tasks of repair: a small repository with a bug, tests that it may be run against, and tests that it is judged by."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from posttrain.data.record_files import read_records
from posttrain.errors import ConfigError, Problem

# Kinds of bug: a wrong comparison, a number that is one off, a wrong operator, and/or, a wrong function, exchanged arguments, a
# missing statement or case, statements in the wrong order, a wrong flag.
Kind = Literal["comparison", "boundary", "operator", "condition", "function", "arguments", "missing", "order", "flag"]
_CALL = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class Case:
    """One test: a call, and the result that it must have or the name of the exception that it must raise."""

    call: str  # package.module:function
    arguments: tuple[Any, ...]  # JSON values
    result: Any = None
    error: str = ""

    def passed(self, outcome: Mapping[str, Any]) -> bool:
        """Compare an outcome of ``in_box``. Whole numbers and truth values differ, the order of keys does not."""
        if self.error:
            return outcome.get("error") == self.error
        return "value" in outcome and _canonical(outcome["value"]) == _canonical(self.result)

    def asked(self) -> str:
        """Write the call as Python does."""
        return f"{self.call.partition(':')[2]}({', '.join(map(repr, self.arguments))})"

    def wanted(self) -> str:
        return f"raises {self.error}" if self.error else repr(self.result)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairTask:
    name: str
    files: Mapping[str, str]  # by path in the repository
    tests: Sequence[Case]  # the policy may read and run them
    hidden: Sequence[Case] = ()  # it is judged by these, too
    description: str = ""
    kind: str = field(default="")  # of bug

    @property
    def all(self) -> list[Case]:
        return [*self.tests, *self.hidden]


@lru_cache(maxsize=4)
def tasks_of(file: str) -> tuple[RepairTask, ...]:
    """Read a file of tasks, once per process. Raises: ConfigError with the first row that is none; DataError."""
    path = Path(file).expanduser()
    if not path.is_file():
        fix = "name a JSONL file, or leave tasks out for tasks made from built-in repositories"
        raise ConfigError(Problem(f"there is no file {file}", fix=fix, field="tasks"))
    found = tuple(_task(record, f"row {number} of {path.name}") for number, record in enumerate(read_records(path)))
    if not found:
        raise ConfigError(Problem(f"{path.name} has no row", fix="name a file with tasks", field="tasks"))
    return found


def _task(record: Mapping[str, Any], where: str) -> RepairTask:
    files = _decoded(record.get("files"))
    if not isinstance(files, Mapping) or not files or not all(isinstance(text, str) for text in files.values()):
        raise _wrong(f"{where} has no files", 'write {"files": {"shop/cart.py": "the text", ...}}')
    for path in files:
        if problem := path_problem(path):
            raise _wrong(f"{where}: {problem}", "write paths such as shop/cart.py")
    tests = _cases(record.get("tests"), f"{where}, tests")
    if not tests:
        raise _wrong(
            f"{where} has no tests", 'write [{"call": "shop.cart:total", "arguments": [[1]], "result": 1}, ...]'
        )
    return RepairTask(
        name=str(record.get("name") or where),
        files=dict(files),
        tests=tests,
        hidden=_cases(record.get("hidden"), f"{where}, hidden"),
        description=str(record.get("description") or ""),
    )


def _cases(written: Any, where: str) -> tuple[Case, ...]:
    given = _decoded(written)
    if given is None:
        return ()
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise _wrong(f"{where} is no list", "write a list of {call, arguments, result or error}")
    return tuple(_case(each, f"{where}, test {number}") for number, each in enumerate(given))


def _case(written: Any, where: str) -> Case:
    fix = (
        'write {"call": "shop.cart:total", "arguments": [[1, 2]], "result": 3}, or "error": "ValueError" for the result'
    )
    if not isinstance(written, Mapping):
        raise _wrong(f"{where} is no mapping", fix)
    call, arguments, error = written.get("call"), written.get("arguments", []), written.get("error") or ""
    if not isinstance(call, str) or not _CALL.fullmatch(call):
        raise _wrong(f"{where} calls {call!r}", fix)
    if not isinstance(arguments, list):
        raise _wrong(f"{where}: its arguments are no list", fix)
    if not isinstance(error, str) or ("result" in written) == bool(error):
        raise _wrong(f"{where} needs a result or an error", fix)
    return Case(call, tuple(arguments), written.get("result"), error)


def path_problem(path: str) -> str:
    """Return why a path is none of a file in a repository; "" where it is one."""
    parts = path.split("/")
    if len(path) > 200 or any(not re.fullmatch(r"[\w\-][\w\-.]*", part) for part in parts):
        return f"{path[:80]!r} is no path in the repository (such as shop/cart.py)"
    return ""


def _decoded(written: Any) -> Any:
    """Columns of parquet and CSV hold JSON as text."""
    try:
        return json.loads(written) if isinstance(written, str) else written
    except ValueError:
        return written


def _wrong(what: str, fix: str) -> ConfigError:
    return ConfigError(Problem(what, fix=fix, field="tasks"))


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
