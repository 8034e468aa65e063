"""Raw rows of a dataset file: .parquet, .jsonl, .json, .csv and .arrow, in file order; errors name the row. A slice behind a
file's name, ``train.parquet[:100]``, means these of its rows (libraries/row_slices.py); a folder means its files (folders.py).

Rows are counted from 0, as in pandas and datasets; lines of a text file from 1, as in editors.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from posttrain.data.columns import ColumnChoice, Columns, root
from posttrain.data.folders import files_of_folder
from posttrain.errors import DataError, Problem, did_you_mean, nearest
from posttrain.libraries import json_text
from posttrain.libraries.row_slices import RowSlice, split_slice

Record = dict[str, Any]  # an unchecked row, by column

_PARQUET_FILE = b"PAR1"  # a parquet file begins with it, whatever its name is
_ARROW_FILE = b"ARROW1"  # an Arrow file begins with it, a stream does not

# The beginning of a list of texts written as JSON text.
_TEXTS_AS_TEXT = re.compile(r'\s*\[\s*["\]]')


def read_records(path: str | Path) -> Iterator[Record]:
    """Yield the raw rows of a file, with all columns. Raises: DataError when it cannot be read."""
    yield from records(Path(path).expanduser(), None)


def count_rows(path: str | Path) -> int:
    """Count the rows of a file, from the metadata of a parquet file; other files are read through.

    Raises: DataError when the file cannot be read.
    """
    file, part = file_and_slice(path)
    if part is not None:
        return len(part.of(count_rows(file)))
    if file.is_dir():
        return sum(map(count_rows, files_of_folder(file, KINDS)))
    if kind_of(file) == "parquet":
        with readable(file), pq.ParquetFile(file) as table:
            return int(table.metadata.num_rows)
    return sum(1 for _ in records(file, None))


def file_and_slice(path: str | Path) -> tuple[Path, RowSlice | None]:
    """Split a path into its file and the slice of its rows; None for a whole file, and for one whose own name ends like that."""
    whole = Path(path).expanduser()
    name, part = split_slice(whole.name)
    return (whole, None) if part is None or whole.exists() else (whole.with_name(name), part)


def first_record(
    path: str, field: str, choice: ColumnChoice | None = None, *, read: bool = True
) -> tuple[Record | None, list[Problem]]:
    """Read the first raw row of a file that the setting ``field`` names. Returns: it, or the problems. With ``read`` False only
    the existence of the file is checked."""
    if "://" in path:
        return None, [Problem(f"{path} is not on this machine", fix="download it and name the local file", field=field)]
    file, part = file_and_slice(path)
    if not file.exists():
        return None, [_missing_file(file, path if part is None else str(file), field)]
    if not read:
        return None, []
    try:
        record = next(iter(records(Path(path).expanduser(), choice)), None)
    except DataError as error:
        return None, [Problem(item.what, fix=item.fix, field=item.field or field) for item in error.problems]
    return record, [] if record is not None else [Problem(f"{path} holds no rows", field=field)]


def _missing_file(file: Path, path: str, field: str) -> Problem:
    if not file.parent.is_dir():
        return Problem(f"there is no file {path}: the folder {file.parent} does not exist", field=field)
    guess = nearest(file.name, sorted(item.name for item in file.parent.iterdir()))
    return Problem(f"there is no file {path}", fix=f"did you mean {file.parent / guess}?" if guess else "", field=field)


def records(file: Path, choice: ColumnChoice | None) -> Iterator[Record]:
    """Yield raw rows. ``choice`` selects the columns; None reads all.

    Raises: DataError when the file cannot be read or lacks a column.
    """
    file, part = file_and_slice(file)
    with readable(file):
        rows = _READERS[kind_of(file)](file, choice)
        if part is None:
            yield from rows
            return
        wanted = part.of(count_rows(file) if part.needs_count else sys.maxsize)
        yield from islice(rows, wanted.start, wanted.stop)


def kind_of(file: Path) -> str:
    """Return the kind of a file, such as parquet; ``folder`` of a folder. Raises: DataError."""
    file, _ = file_and_slice(file)
    if file.is_dir():
        return "folder"
    kind = file.suffix.lower().removeprefix(".")
    if f".{kind}" not in KINDS:
        if file.is_file() and _begins_with(file, _PARQUET_FILE):
            return "parquet"
        known = ", ".join(KINDS)
        raise DataError(Problem(f"{file.name} is of no known kind", fix=f"use one of {known}"))
    return kind


def _begins_with(file: Path, mark: bytes) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(mark)) == mark


def is_whole_parquet(file: Path) -> bool:
    """True for a parquet file of which every row is meant, so that a column of it can be read alone."""
    return kind_of(file) == "parquet" and file_and_slice(file)[1] is None


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Convert the libraries' errors about a damaged or misnamed file to a DataError that names it."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError(Problem(f"{file.name} is not UTF-8 text ({error.reason} at byte {error.start})")) from error
    except (OSError, pa.ArrowException, csv.Error) as error:
        raise DataError(Problem(f"{file} cannot be read: {error}")) from error


def _read_parquet(file: Path, choice: ColumnChoice | None) -> Iterator[Record]:
    with pq.ParquetFile(file) as table:
        wanted = table.schema_arrow.names
        if choice is not None:
            roots = parquet_columns(table, file, choice).roots()
            wanted = [name for name in wanted if name in roots]
        for batch in table.iter_batches(batch_size=1024, columns=wanted):
            yield from batch.to_pylist()


def _read_arrow(file: Path, choice: ColumnChoice | None) -> Iterator[Record]:
    """Yield the rows of a stream of Arrow batches, which datasets writes, or of an Arrow file."""
    with pa.memory_map(str(file)) as source:
        is_file = source.read(len(_ARROW_FILE)) == _ARROW_FILE
        source.seek(0)
        batches = _batches(pa.ipc.open_file(source)) if is_file else pa.ipc.open_stream(source)
        wanted: list[str] | None = None
        for batch in batches:
            if choice is not None and wanted is None:
                roots = _columns_of(batch.schema, file, choice).roots()
                wanted = [name for name in batch.schema.names if name in roots]
            yield from (batch if wanted is None else batch.select(wanted)).to_pylist()


def _batches(table: pa.ipc.RecordBatchFileReader) -> Iterator[pa.RecordBatch]:
    return (table.get_batch(number) for number in range(table.num_record_batches))


def parquet_columns(table: pq.ParquetFile, file: Path, choice: ColumnChoice) -> Columns:
    return _columns_of(table.schema_arrow, file, choice)


def _columns_of(schema: pa.Schema, file: Path, choice: ColumnChoice) -> Columns:
    def has(path: str) -> bool:
        if path in schema.names:
            return True
        first, *rest = path.split(".")
        kind = schema.field(first).type if first in schema.names else None
        for key in rest:
            if not isinstance(kind, pa.StructType) or key not in kind.names:
                return False
            kind = kind.field(key).type
        return kind is not None

    return choice.check(schema.names, has, file.name)


def _read_json_lines(file: Path, choice: ColumnChoice | None) -> Iterator[Record]:
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _json_object(line, f"line {number} of {file.name}", file, choice)


def _read_json(file: Path, choice: ColumnChoice | None) -> Iterator[Record]:
    """Yield the objects of an array, or of one object per line."""
    with file.open(encoding="utf-8-sig") as text:
        start = text.read(4096).lstrip()[:1]
        if start != "[":
            yield from _read_json_lines(file, choice)
            return
        text.seek(0)
        try:
            rows = json_text.loads(text.read())
        except json.JSONDecodeError as error:
            raise DataError(Problem(f"{file.name} is not JSON: {error}")) from error
    for number, row in enumerate(rows):
        yield _checked_object(row, f"row {number} of {file.name}", file, choice)


def _json_object(text: str, place: str, file: Path, choice: ColumnChoice | None) -> Record:
    try:
        value = json_text.loads(text)
    except json.JSONDecodeError as error:
        fix = "a .json file holds an array of objects, or one object per line" if file.suffix.lower() == ".json" else ""
        if re.search(r",\s*[}\]]", text[max(0, error.pos - 2) : error.pos + 1]):
            fix = "remove the comma before the bracket"
        elif text.lstrip().startswith("{'"):
            fix = "JSON has double quotes; this looks like a printed Python mapping, which json.dumps writes as JSON"
        raise DataError(Problem(f"{place} is not JSON: {error.msg} at column {error.colno}", fix=fix)) from error
    return _checked_object(value, place, file, choice)


def _checked_object(value: Any, place: str, file: Path, choice: ColumnChoice | None) -> Record:
    if not isinstance(value, dict):
        raise DataError(Problem(f"{place} holds {described(value)}", fix="each row is an object, column by column"))
    if half := json_text.half_character(value):
        column = half[0].partition(".")[0]
        what = f"{place}: column {column} holds half a character, {half[1]!r}"
        raise DataError(Problem(what, fix="write the whole character, such as both halves of an emoji"))
    if choice is not None:
        choice.check(list(value), lambda path: reaches(value, path), place)
    return value


def _read_csv(file: Path, choice: ColumnChoice | None) -> Iterator[Record]:
    csv.field_size_limit(2**31 - 1)  # the library's default of 131,072 characters is shorter than a long prompt
    with file.open(encoding="utf-8-sig", newline="") as text:
        lines = csv.reader(text, strict=True)
        header = next(lines, None)
        if header is None:
            return
        if len(header) == 1 and (found := re.search(r"[;\t|]", header[0])):
            what = f"the cells of {file.name} are separated by {found[0]!r}, and commas are expected"
            raise DataError(Problem(what, fix="save it again with commas, or as JSONL or parquet"))
        if choice is not None:
            choice.check(header, lambda path: path in header or root(path) in header, file.name)
        number = -1
        for cells in lines:
            if not cells:  # an empty line
                continue
            number += 1
            place = f"row {number} of {file.name} (line {lines.line_num})"
            if len(cells) != len(header):
                what = f"{place} has {len(cells)} cells under a header of {len(header)}"
                raise DataError(Problem(what, fix="put a cell with a comma or a line break in it in double quotes"))
            record: Record = dict(zip(header, cells, strict=True))
            yield record if choice is None else _with_json_cells(record, place, choice.columns)


def _read_folder(folder: Path, choice: ColumnChoice | None) -> Iterator[Record]:
    for file in files_of_folder(folder, KINDS):
        yield from records(file, choice)


_READERS: dict[str, Callable[[Path, ColumnChoice | None], Iterator[Record]]] = {
    "folder": _read_folder,
    "parquet": _read_parquet,
    "jsonl": _read_json_lines,
    "json": _read_json,
    "csv": _read_csv,
    "arrow": _read_arrow,
}
KINDS = tuple(f".{name}" for name in _READERS if name != "folder")


def _with_json_cells(record: Record, place: str, columns: Columns) -> Record:
    """Parse the JSON cells of a csv row: nested columns always, the prompt when it is a list of messages."""
    nested = {columns.extra_info}
    if columns.ground_truth is not None and columns.ground_truth not in record:
        nested.add(root(columns.ground_truth))
    # "[INST] hello" is a plain prompt.
    if columns.prompt and re.match(r"\s*\[\s*[{\]]", record[columns.prompt]):
        nested.add(columns.prompt)
    if columns.responses and _TEXTS_AS_TEXT.match(record[columns.responses]):
        nested.add(columns.responses)
    for column in nested & set(record):
        try:
            record[column] = json_text.loads(record[column]) if record[column].strip() else {}
        except json.JSONDecodeError as error:
            what = f"{place}: the cell in column {column} is not JSON: {error.msg} at character {error.pos}"
            raise DataError(Problem(what)) from error
    return record


class Unreachable(Exception):
    """There is no value at a dotted path; the message explains why."""


def reaches(record: Mapping[str, Any], path: str) -> bool:
    """Return True when there is a value at a dotted path."""
    try:
        drill(record, path)
    except (Unreachable, KeyError):
        return False
    return True


def drill(record: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path; a column with exactly this name takes precedence."""
    if path in record:
        return record[path]
    value: Any = record
    for depth, key in enumerate(parts := path.split(".")):
        if not isinstance(value, Mapping):
            raise Unreachable(f"cannot be reached: {'.'.join(parts[:depth])} holds {described(value)}")
        if key not in value:
            fix = did_you_mean(key, list(value)) if value else "it is empty"
            raise Unreachable(f"cannot be reached: there is no {key!r} in {'.'.join(parts[:depth])}; {fix}")
        value = value[key]
    return value


def described(value: Any) -> str:
    """Describe a value in an error message."""
    if value is None:
        return "nothing"
    if isinstance(value, (Mapping, list)):
        return f"a {'mapping' if isinstance(value, Mapping) else 'list'} of {len(value)}"
    text = repr(value)
    return f"{text[:40]}…" if len(text) > 40 else text
