"""Read-only queries of an SQLite database."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.tool import Tool, ToolFailed, parameters
from posttrain.registry import TOOLS

_LONGEST_VALUE = 1 << 20  # bytes of a text or blob, also of intermediate ones
_STEPS = 1000  # virtual machine instructions between two checks of the time limit
# Actions of a query that are allowed: reading. Attaching files, pragmas, extensions and writes are rejected.
_READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE, sqlite3.SQLITE_FUNCTION}
_REFUSED_FUNCTIONS = {"load_extension"}


@TOOLS.register("sql")
def sql(*, database: str, timeout_s: float = 5.0, max_rows: int = 20) -> Tool:
    """A tool that returns the rows of a query.

    Args: database, an SQLite file; timeout_s of one query; max_rows shown.
    Raises: ConfigError for other files, or for invalid limits.
    """
    for name, value in (("timeout_s", timeout_s), ("max_rows", max_rows)):
        if value <= 0:
            raise ConfigError(Problem(f"{name} is {value}", fix="use more than 0"))
    path = Path(database).expanduser()
    if not path.is_file():
        raise ConfigError(Problem(f"there is no file {database}", fix="name an SQLite database"))
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, check_same_thread=False)
    try:
        tables = [
            row[0] for row in connection.execute("select sql from sqlite_master where type = 'table' and sql > ''")
        ]
    except sqlite3.DatabaseError as error:
        connection.close()
        raise ConfigError(Problem(f"{database} is no SQLite database: {error}")) from None
    connection.set_authorizer(_allowed)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
    return Tool(
        name="sql",
        description="Answers one SELECT statement in SQLite's language. The tables:\n" + "\n".join(tables),
        parameters=parameters(query=("string", "a SELECT statement")),
        run=partial(_answer, connection=connection, timeout_s=timeout_s, max_rows=max_rows),
        close=connection.close,
    )


def _allowed(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    refused = action == sqlite3.SQLITE_FUNCTION and second in _REFUSED_FUNCTIONS
    return sqlite3.SQLITE_OK if action in _READS and not refused else sqlite3.SQLITE_DENY


def _answer(arguments: Mapping[str, Any], *, connection: sqlite3.Connection, timeout_s: float, max_rows: int) -> str:
    deadline = time.monotonic() + timeout_s
    connection.set_progress_handler(lambda: int(time.monotonic() > deadline), _STEPS)
    try:
        cursor = connection.execute(str(arguments["query"]))
        rows = cursor.fetchmany(max_rows + 1)
    except (sqlite3.Error, sqlite3.Warning) as error:
        late = time.monotonic() > deadline
        raise ToolFailed(f"the query took longer than {timeout_s:g} s" if late else f"SQL error: {error}") from None
    names = [column[0] for column in cursor.description or ()]
    lines = [" | ".join(names), *(" | ".join(map(str, row)) for row in rows[:max_rows])]
    if len(rows) > max_rows:
        lines.append(f"(more than {max_rows} rows)")
    return "\n".join(lines) if rows else f"{lines[0]}\n(no rows)"
