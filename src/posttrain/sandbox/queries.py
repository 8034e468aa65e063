"""SQL that a model wrote, run on an SQLite database in a box: SQLite is C code, and a query can crash it or take its memory.

The database is opened read-only and as immutable, so it needs no lock file beside it. What a query returns is the box's word,
and is checked here before anything else reads it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.sandbox.boxes import BoxRun, Program, run
from posttrain.sandbox.walls import BoxLimits

_OPEN = """
import json, sqlite3, sys, urllib.parse
given = json.load(sys.stdin)
database = sqlite3.connect(f"file:{urllib.parse.quote(given['path'])}?mode=ro&immutable=1", uri=True)
database.text_factory = lambda raw: raw.decode("utf-8", "replace")
"""
# Every row, each once. Bytes become a pair that JSON can hold.
_ALL_ROWS = """
rows = {tuple(row) for row in database.execute(given["sql"])}
json.dump([[["bytes", cell.hex()] if isinstance(cell, bytes) else cell for cell in row] for row in rows], sys.stdout)
"""
# The first rows, as text, of a query that may read and call the functions on the list. A virtual table is connected as if it were
# created, which is refused, so the tables that the database has, and SQLite's own, are connected before.
_FIRST_ROWS = """
database.execute("pragma temp_store = memory")
virtual = database.execute("select name from sqlite_master where type = 'table' and sql like 'create virtual table%'")
names = ['"' + name.replace('"', '""') + '"' for name, in virtual]
for name in (*names, "json_each('[]')", "json_tree('[]')"):
    try:
        database.execute(f"select * from {name} limit 0")
    except sqlite3.Error:
        pass  # this SQLite does not know such tables
actions = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
functions = set(given["functions"].split())
def allowed(action, first, second, *_):
    read = action in actions or (action == sqlite3.SQLITE_PRAGMA and first == "data_version")  # full-text search asks for it
    called = action == sqlite3.SQLITE_FUNCTION and second.lower() in functions
    return sqlite3.SQLITE_OK if read or called else sqlite3.SQLITE_DENY
database.set_authorizer(allowed)
database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, given["value_bytes"])
database.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
answer, size = {"columns": [], "rows": [], "more": ""}, 0
try:
    cursor = database.execute(given["sql"])
    answer["columns"] = [column[0] for column in cursor.description or ()]
    for row in cursor:
        cells = [str(cell) for cell in row]
        size += sum(map(len, cells))
        if len(answer["rows"]) == given["max_rows"] or size > given["answer_characters"]:
            answer["more"] = "rows" if len(answer["rows"]) == given["max_rows"] else "characters"
            break
        answer["rows"].append(cells)
except MemoryError:
    answer = {"error": "out of memory"}
except (sqlite3.Error, sqlite3.Warning, ValueError) as error:  # half a character is a ValueError
    answer = {"error": str(error)}
json.dump(answer, sys.stdout)
"""
# Functions that return values made of their arguments, and no more. Not on it: fts3_tokenizer, which takes a function pointer,
# load_extension, readfile, writefile, edit and functions that SQLite does not have itself.
FUNCTIONS = """
-> ->> abs acos acosh asin asinh atan atan2 atanh avg bm25 ceil ceiling char coalesce concat concat_ws cos cosh count
cume_dist current_date current_time current_timestamp date datetime degrees dense_rank exp first_value floor format glob
group_concat hex highlight ifnull iif if instr json json_array json_array_length json_error_position json_extract
json_group_array json_group_object json_insert json_object json_patch json_pretty json_quote json_remove json_replace
json_set json_type json_valid julianday lag last_value lead length like likelihood likely ln log log10 log2 lower ltrim
match matchinfo max median min mod nth_value ntile nullif octet_length offsets percent_rank percentile percentile_cont
percentile_disc pi pow power printf quote radians random rank replace round row_number rtrim sign sin sinh snippet
soundex sqrt strftime string_agg substr substring sum tan tanh time timediff total trim trunc typeof unhex unicode
unistr unistr_quote unixepoch unlikely upper
"""
_VALUE_BYTES = 1 << 20  # of one text or blob, also of those in between
_ANSWER_CHARACTERS = 1 << 16  # of all cells of an answer


class QueryFailed(Exception):
    """A query has no answer. Says why, for the model."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The first rows of an answer, as text."""

    columns: list[str]
    rows: list[list[str]]
    more: str  # "rows" or "characters": the limit that left further rows out; "" when there are none


def first_rows(file: Path, query: str, limits: BoxLimits, walls: Sequence[str], *, max_rows: int) -> Rows:
    """Answer a query that may only read, and call the functions of FUNCTIONS.

    Raises: QueryFailed; BoxError when there is no box.
    """
    given = {
        "path": str(file),
        "sql": query,
        "functions": FUNCTIONS,
        "max_rows": max_rows,
        "value_bytes": _VALUE_BYTES,
        "answer_characters": _ANSWER_CHARACTERS,
    }
    done = _run(_FIRST_ROWS, file, given, limits, walls)
    if done.ended == "timeout":
        raise QueryFailed(f"the query took longer than {limits.timeout_s:g} s")
    if not done.finished:
        raise QueryFailed(f"the query was ended: {done.why()}")
    try:
        answer = json.loads(done.stdout)
        if "error" in answer:
            raise QueryFailed(f"SQL error: {answer['error']}")
        rows = [[str(cell) for cell in row] for row in answer["rows"]]
        return Rows([str(name) for name in answer["columns"]], rows, str(answer["more"]))
    except (ValueError, TypeError, KeyError) as error:
        raise QueryFailed("the query was ended: its answer cannot be read") from error


def all_rows(file: Path, query: str, limits: BoxLimits, walls: Sequence[str]) -> BoxRun:
    """Run a query with all that SQLite can do; ``rows_of`` a finished run are its rows. Raises: BoxError."""
    return _run(_ALL_ROWS, file, {"path": str(file), "sql": query}, limits, walls)


def rows_of(done: BoxRun) -> frozenset[tuple[Any, ...]]:
    """Raises: ValueError when what the box says is no list of rows."""
    try:
        rows = [[tuple(cell) if isinstance(cell, list) else cell for cell in row] for row in json.loads(done.stdout)]
        return frozenset(map(tuple, rows))
    except TypeError as error:
        raise ValueError("the answer is no list of rows") from error


def _run(program: str, file: Path, given: dict[str, Any], limits: BoxLimits, walls: Sequence[str]) -> BoxRun:
    return run(Program(source=_OPEN + program, stdin=json.dumps(given), readable=(str(file),)), limits, walls)
