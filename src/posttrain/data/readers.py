"""Rows of a dataset file: .parquet, .jsonl, .json and .csv, in file order, with errors that name the row.

Neither torch nor transformers is needed to look at a dataset. Rows are counted from 0, as pandas and datasets count
them; lines of a text file from 1, as editors do.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from posttrain.config.data import DataConfig
from posttrain.data.columns import ColumnChoice, Columns, Named, root
from posttrain.errors import DataError, Problem, did_you_mean, nearest

# How many bad rows one error lists.
MAX_LISTED = 10

Record = dict[str, Any]  # a row as the file holds it, by column


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row, checked: what becomes a Prompt once a tokenizer has seen it."""

    number: int  # in its file, from 0
    messages: list[
        dict[str, Any]
    ]  # chat messages, each with role and content; empty where a file of responses has no prompt
    data_source: str
    ground_truth: Any  # as the dataset holds it; None where only prompts are read
    extra_info: dict[str, Any]  # as the dataset holds it; empty when absent
    responses: tuple[str, ...] = ()  # where they are read


def read_rows(
    path: str | Path, data: Named, *, prompts_only: bool = False, responses: str | None = None
) -> Iterator[Row]:
    """The rows of one file, in order.

    Args: ``prompts_only`` reads no other column, so that the others may hold anything; ``responses`` names the column with
        the responses, and makes the prompt optional.
    Raises: DataError when the file cannot be read, or with the first bad rows (at most MAX_LISTED). Rows before the
    first bad one are yielded before it is raised.
    """
    problems: list[Problem] = []
    try:
        for row in checked_rows(path, data, prompts_only=prompts_only, responses=responses):
            if isinstance(row, Problem):
                problems.append(row)
                if len(problems) == MAX_LISTED:
                    break
            elif not problems:
                yield row
    except DataError as error:
        problems += error.problems
    if problems:
        raise DataError(problems)


def checked_rows(
    path: str | Path, data: Named, *, prompts_only: bool = False, responses: str | None = None
) -> Iterator[Row | Problem]:
    """Every row of a file, or what is wrong with it; see ``read_rows``.

    Raises: DataError when the file cannot be read, or lacks a column.
    """
    file = Path(path).expanduser()
    choice = ColumnChoice(data, prompts_only=prompts_only, responses=responses)
    by_row = _kind(file) in ("json", "jsonl")  # every row has keys of its own: one that lacks some does not end it
    for number, record in enumerate(_records(file, None if by_row else choice)):
        try:
            if by_row:
                choice.check(list(record), partial(_reaches, record), f"row {number} of {file.name}")
        except DataError as error:
            if not number:  # the first decides
                raise
            yield error.problems[0]
        else:
            yield _row(record, number, file, choice.columns)


def read_records(path: str | Path) -> Iterator[Record]:
    """The rows of a file as they stand, with all their columns. Raises: DataError when it cannot be read."""
    yield from _records(Path(path).expanduser(), None)


def count_rows(path: str | Path) -> int:
    """Rows of a file; a parquet file's own metadata says it, others are read through.

    Raises: DataError when the file cannot be read.
    """
    file = Path(path).expanduser()
    if _kind(file) == "parquet":
        with _readable(file), pq.ParquetFile(file) as table:
            return int(table.metadata.num_rows)
    return sum(1 for _ in _records(file, None))


def data_sources(path: str | Path, data: Named, *, responses: str | None = None) -> set[str]:
    """The distinct task names of a file. Of a parquet file only that column is read, other kinds are read through.

    Raises: DataError when the file cannot be read or lacks a column. Cells that hold no name are passed over: opening
        the dataset reports them with their rows.
    """
    file = Path(path).expanduser()
    choice = ColumnChoice(data, responses=responses)
    if _kind(file) == "parquet":
        with _readable(file), pq.ParquetFile(file) as table:
            column = _parquet_columns(table, file, choice).data_source
            values = set() if column is None else set(table.read(columns=[column])[column].unique().to_pylist())
    else:
        records = _records(file, choice)
        values = {record.get(choice.columns.data_source) for record in records if choice.columns.data_source}
    if choice.columns.data_source is None:
        return {file.stem}
    return {value for value in values if isinstance(value, str) and value}


def check_files(data: DataConfig) -> list[Problem]:
    """Everything wrong with the dataset files that can be seen without reading them through: existence, kind, columns,
    the first row. Nothing is raised."""
    problems = []
    for field in ("train_files", "validation_files"):
        files = getattr(data, field)
        if field == "train_files" and not files:
            problems.append(Problem("there is no training file", fix="name at least one", field="data.train_files"))
        for path in files:
            problems += check_file(path, ColumnChoice(data), f"data.{field}")
    return problems


def check_file(path: str, choice: ColumnChoice, field: str) -> list[Problem]:
    """The same of one file, in which ``choice`` looks for columns and which the setting ``field`` names."""
    record, problems = first_record(path, field, choice)
    if record is None:
        return problems
    row = _row(record, 0, Path(path).expanduser(), choice.columns)
    return [row] if isinstance(row, Problem) else []


def first_record(
    path: str, field: str, choice: ColumnChoice | None = None, *, read: bool = True
) -> tuple[Record | None, list[Problem]]:
    """The first row of a file that the setting ``field`` names, as it stands, or why there is none. With ``read`` False it
    is only looked for."""
    if "://" in path:
        return None, [Problem(f"{path} is not on this machine", fix="download it and name the local file", field=field)]
    file = Path(path).expanduser()
    if not file.is_file():
        return None, [_missing_file(file, path, field)]
    if not read:
        return None, []
    try:
        record = next(iter(_records(file, choice)), None)
    except DataError as error:
        return None, [Problem(item.what, fix=item.fix, field=item.field or field) for item in error.problems]
    return record, [] if record is not None else [Problem(f"{path} holds no rows", field=field)]


def _missing_file(file: Path, path: str, field: str) -> Problem:
    if file.is_dir():
        return Problem(f"{path} is a folder", fix="name the files in it", field=field)
    if not file.parent.is_dir():
        return Problem(f"there is no file {path}: the folder {file.parent} does not exist", field=field)
    guess = nearest(file.name, sorted(item.name for item in file.parent.iterdir()))
    return Problem(f"there is no file {path}", fix=f"did you mean {file.parent / guess}?" if guess else "", field=field)


# ------------------------------------------------------------------------------------------------ files to records


def _records(file: Path, choice: ColumnChoice | None) -> Iterator[Record]:
    """Rows as they stand. ``choice`` decides which columns matter; None reads them all.

    Raises: DataError when the file cannot be read or lacks a column.
    """
    with _readable(file):
        yield from _READERS[_kind(file)](file, choice)


def _kind(file: Path) -> str:
    kind = file.suffix.lower().removeprefix(".")
    if kind not in _READERS:
        known = ", ".join(f".{name}" for name in _READERS)
        raise DataError(Problem(f"{file.name} is of no known kind", fix=f"use one of {known}"))
    return kind


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """What the libraries raise on a file that is not what its name says becomes a DataError that names it."""
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
            roots = _parquet_columns(table, file, choice).roots()
            wanted = [name for name in wanted if name in roots]
        for batch in table.iter_batches(batch_size=1024, columns=wanted):
            yield from batch.to_pylist()


def _parquet_columns(table: pq.ParquetFile, file: Path, choice: ColumnChoice) -> Columns:
    schema = table.schema_arrow

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
    """An array of objects, or one object per line."""
    with file.open(encoding="utf-8-sig") as text:
        start = text.read(4096).lstrip()[:1]
        if start != "[":
            yield from _read_json_lines(file, choice)
            return
        text.seek(0)
        try:
            rows = json.load(text)
        except json.JSONDecodeError as error:
            raise DataError(Problem(f"{file.name} is not JSON: {error}")) from error
    for number, row in enumerate(rows):
        yield _checked_object(row, f"row {number} of {file.name}", file, choice)


def _json_object(text: str, place: str, file: Path, choice: ColumnChoice | None) -> Record:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        fix = "a .json file holds an array of objects, or one object per line" if file.suffix.lower() == ".json" else ""
        raise DataError(Problem(f"{place} is not JSON: {error.msg} at column {error.colno}", fix=fix)) from error
    return _checked_object(value, place, file, choice)


def _checked_object(value: Any, place: str, file: Path, choice: ColumnChoice | None) -> Record:
    if not isinstance(value, dict):
        raise DataError(Problem(f"{place} holds {said(value)}", fix="each row is an object, column by column"))
    if choice is not None:
        choice.check(list(value), lambda path: _reaches(value, path), place)
    return value


def _read_csv(file: Path, choice: ColumnChoice | None) -> Iterator[Record]:
    csv.field_size_limit(2**31 - 1)  # the library's own limit of 131,072 characters is shorter than a long prompt
    with file.open(encoding="utf-8-sig", newline="") as text:
        lines = csv.reader(text, strict=True)
        header = next(lines, None)
        if header is None:
            return
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


_READERS: dict[str, Callable[[Path, ColumnChoice | None], Iterator[Record]]] = {
    "parquet": _read_parquet,
    "jsonl": _read_json_lines,
    "json": _read_json,
    "csv": _read_csv,
}


def _with_json_cells(record: Record, place: str, columns: Columns) -> Record:
    """A csv row with its JSON cells read: nested columns always, the prompt when it is a list of messages."""
    nested = {columns.extra_info}
    if columns.ground_truth is not None and columns.ground_truth not in record:
        nested.add(root(columns.ground_truth))
    if columns.prompt and re.match(r"\s*\[\s*[{\]]", record[columns.prompt]):  # "[INST] hello" is a prompt in words
        nested.add(columns.prompt)
    if columns.responses and _TEXTS_AS_TEXT.match(record[columns.responses]):
        nested.add(columns.responses)
    for column in nested & set(record):
        try:
            record[column] = json.loads(record[column]) if record[column].strip() else {}
        except json.JSONDecodeError as error:
            what = f"{place}: the cell in column {column} is not JSON: {error.msg} at character {error.pos}"
            raise DataError(Problem(what)) from error
    return record


# ------------------------------------------------------------------------------------------------ records to rows


# How a list of chat messages begins when it is written as JSON text, as in ROLL's files.
_MESSAGES_AS_TEXT = re.compile(r'\s*\[\s*\{\s*"(?:role|content)"\s*:')


# How a list of texts begins when it is written as JSON text.
_TEXTS_AS_TEXT = re.compile(r'\s*\[\s*["\]]')


class _BadValue(Exception):
    """What is wrong with a cell; caught in _row, which knows the row."""


def _row(record: Mapping[str, Any], number: int, file: Path, columns: Columns) -> Row | Problem:
    """The checked row, or the first thing that is wrong with it."""
    field, column = "prompt_column", columns.prompt or ""
    try:
        messages = _messages(record[column]) if column else []
        field, column = "response_column", columns.responses or ""
        responses = _responses(record[column]) if column else ()
        field, column = "data_source_column", columns.data_source or ""
        source = record[column] if column else file.stem
        if not isinstance(source, str) or not source:
            raise _BadValue(f"holds {said(source)}; the name of a task is expected")
        field, column = "ground_truth_column", columns.ground_truth or ""
        truth = _drill(record, column) if column else None
        field, column = "extra_info_column", columns.extra_info
        extra = record.get(column)
        if extra is not None and not isinstance(extra, Mapping):
            raise _BadValue(f"holds {said(extra)}; a mapping is expected")
    except _BadValue as error:
        return Problem(f"row {number} of {file.name}: column {column} {error}", field=f"data.{field}")
    return Row(
        number=number,
        messages=messages,
        data_source=source,
        ground_truth=truth,
        extra_info={**(extra or {}), **{name: record[name] for name in columns.extra if name in record}},
        responses=responses,
    )


def _responses(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise _BadValue(f"holds {said(value)}; a text or a list of texts is expected")
    if not value:
        raise _BadValue("holds a list of 0 responses; at least one is expected")
    for index, response in enumerate(value):
        if not isinstance(response, str):
            raise _BadValue(f"holds {said(response)} as response {index}; text is expected")
    return tuple(value)


def _messages(prompt: Any) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise _BadValue("holds an empty text; a question is expected")
        if not _MESSAGES_AS_TEXT.match(prompt):
            return [{"role": "user", "content": prompt}]
        try:
            prompt = json.loads(prompt)
        except json.JSONDecodeError as error:
            raise _BadValue(f"holds messages that are not JSON: {error.msg} at character {error.pos}") from error
    if not isinstance(prompt, list):
        raise _BadValue(f"holds {said(prompt)}; a text or a list of chat messages is expected")
    if not prompt:
        raise _BadValue("holds a list of 0 messages; at least one is expected")
    messages = []
    for index, message in enumerate(prompt):
        if not isinstance(message, Mapping):
            raise _BadValue(f"holds {said(message)} as message {index}; a mapping with role and content is expected")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                missing = f"holds {said(message[key])} as {key} of message {index}" if key in message else ""
                raise _BadValue((missing or f"has no {key} in message {index}") + "; text is expected")
        # parquet gives every message the keys of all others, as None
        messages.append({key: value for key, value in message.items() if value is not None})
    return messages


def _reaches(record: Mapping[str, Any], path: str) -> bool:
    """Whether there is a value under a dotted path."""
    try:
        _drill(record, path)
    except (_BadValue, KeyError):
        return False
    return True


def _drill(record: Mapping[str, Any], path: str) -> Any:
    """The value under a dotted path; a column that is called exactly so comes first."""
    if path in record:
        return record[path]
    value: Any = record
    for depth, key in enumerate(parts := path.split(".")):
        if not isinstance(value, Mapping):
            raise _BadValue(f"cannot be reached: {'.'.join(parts[:depth])} holds {said(value)}")
        if key not in value:
            fix = did_you_mean(key, list(value)) if value else "it is empty"
            raise _BadValue(f"cannot be reached: there is no {key!r} in {'.'.join(parts[:depth])}; {fix}")
        value = value[key]
    return value


def said(value: Any) -> str:
    """A value in words, for an error."""
    if value is None:
        return "nothing"
    if isinstance(value, (Mapping, list)):
        return f"a {'mapping' if isinstance(value, Mapping) else 'list'} of {len(value)}"
    text = repr(value)
    return f"{text[:40]}…" if len(text) > 40 else text
