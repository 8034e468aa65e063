"""Read-only queries of an SQLite database, each in a sandbox of its own (docs/sandbox.md)."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.tool import KEEPS_NOTHING, Tool, ToolFailed, parameters
from posttrain.registry import TOOLS
from posttrain.sandbox.boxes import BoxError
from posttrain.sandbox.layers import walls_for
from posttrain.sandbox.queries import QueryFailed, first_rows
from posttrain.sandbox.walls import BoxLimits
from posttrain.settings import Positive, PositiveInt


@TOOLS.register("sql", files=("database",))
def sql(
    *,
    database: str,
    timeout_s: Positive = 5.0,
    max_rows: PositiveInt = 20,
    memory_mib: PositiveInt = 256,
    allow_unboxed: bool = False,
) -> Tool:
    """A tool that returns the rows of a query.

    Args: database, an SQLite file; timeout_s and memory_mib of one query; max_rows shown; allow_unboxed runs queries with this
        user's rights on a machine without sandboxes.
    Raises: ConfigError for other files, and on a machine without sandboxes.
    """
    path = Path(database).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(Problem(f"there is no file {database}", fix="name an SQLite database"))
    log = path.with_name(f"{path.name}-wal")
    if log.is_file() and log.stat().st_size:
        what = f"{database} has changes that are not in it yet, in {log.name}"
        raise ConfigError(Problem(what, fix=f'merge them: sqlite3 {database} "pragma wal_checkpoint(truncate)"'))
    return Tool(
        name="sql",
        description="Answers one SELECT statement in SQLite's language. The tables:\n" + "\n".join(_tables(path)),
        parameters=parameters(query=("string", "a SELECT statement")),
        run=partial(
            _answer,
            database=path,
            limits=BoxLimits(timeout_s=timeout_s, memory_bytes=memory_mib << 20),
            walls=walls_for("the tool sql", allow_unboxed=allow_unboxed),
            max_rows=max_rows,
        ),
        **KEEPS_NOTHING,
    )


def _tables(database: Path) -> list[str]:
    """The statements that made its tables. Raises: ConfigError."""
    connection = sqlite3.connect(f"{database.as_uri()}?mode=ro&immutable=1", uri=True)
    try:
        found = connection.execute("select sql from sqlite_master where type = 'table' and sql > ''").fetchall()
    except sqlite3.DatabaseError as error:
        raise ConfigError(Problem(f"{database} is no SQLite database: {error}")) from None
    finally:
        connection.close()
    return [statement for (statement,) in found]


def _answer(
    arguments: Mapping[str, Any], *, database: Path, limits: BoxLimits, walls: Sequence[str], max_rows: int
) -> str:
    try:
        found = first_rows(database, str(arguments["query"]), limits, walls, max_rows=max_rows)
    except QueryFailed as error:
        raise ToolFailed(str(error)) from None
    except BoxError as error:
        raise ToolFailed(f"the query could not be run: {error}") from error
    lines = [" | ".join(found.columns), *(" | ".join(row) for row in found.rows)]
    if found.more:
        lines.append(f"(more than {max_rows} rows)" if found.more == "rows" else "(the other rows are too long)")
    return "\n".join(lines) if found.rows or found.more else f"{lines[0]}\n(no rows)"
