"""Rows of a dataset file, checked; errors name the row.

Needs neither torch nor transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from posttrain.config.data import DataConfig
from posttrain.data.columns import ColumnChoice, Columns, Named
from posttrain.data.images import BadImage, ImageFile, ImageRules, place_images, read_images, refuse_videos
from posttrain.data.record_files import (
    Unreachable,
    described,
    drill,
    first_record,
    is_whole_parquet,
    kind_of,
    parquet_columns,
    reaches,
    readable,
    records,
)
from posttrain.errors import DataError, Problem
from posttrain.libraries import json_text

# Most bad rows listed by one error.
MAX_LISTED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRow:
    """One checked row, not tokenised yet."""

    number: int  # in its file, from 0
    # Chat messages, each with role and content (text, or typed parts); empty where a file of responses has no prompt
    messages: list[dict[str, Any]]
    data_source: str
    ground_truth: Any  # as in the dataset; None where only prompts are read
    extra_info: dict[str, Any]  # as in the dataset; empty when absent
    responses: tuple[str, ...] = ()  # when they are read
    images: tuple[ImageFile, ...] = ()  # when they are read, in the order of the image parts of the messages


def read_rows(
    path: str | Path,
    data: Named,
    *,
    prompts_only: bool = False,
    responses: str | None = None,
    images: ImageRules | None = None,
    references: bool = True,
) -> Iterator[DatasetRow]:
    """Yield the rows of one file, in order.

    Args: ``prompts_only`` reads no other column, so that the others may hold anything; ``responses`` names the column with
        the responses, and makes the prompt optional; ``images`` reads images, too; without ``references`` rows may lack a
        reference answer.
    Raises: DataError when the file cannot be read, or with the first bad rows (at most MAX_LISTED). Rows before the
    first bad one are yielded before it is raised.
    """
    problems: list[Problem] = []
    try:
        for row in checked_rows(
            path, data, prompts_only=prompts_only, responses=responses, images=images, references=references
        ):
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
    path: str | Path,
    data: Named,
    *,
    prompts_only: bool = False,
    responses: str | None = None,
    images: ImageRules | None = None,
    references: bool = True,
) -> Iterator[DatasetRow | Problem]:
    """Yield every row of a file, or its problem; see ``read_rows``.

    Raises: DataError when the file cannot be read, or lacks a column.
    """
    file = Path(path).expanduser()
    choice = ColumnChoice(data, prompts_only=prompts_only, responses=responses, images=images, references=references)
    by_row = kind_of(file) in ("json", "jsonl")  # every row has keys of its own; missing keys are problems of that row
    for number, record in enumerate(records(file, None if by_row else choice)):
        try:
            if by_row:
                choice.check(list(record), partial(reaches, record), f"row {number} of {file.name}")
        except DataError as error:
            if not number:  # the first row decides
                raise
            yield error.problems[0]
        else:
            yield _row(record, number, file, choice)


def data_sources(path: str | Path, data: Named, *, responses: str | None = None, references: bool = True) -> set[str]:
    """Return the distinct task names of a file. Of a parquet file only that column is read, other kinds are read through.

    Raises: DataError when the file cannot be read or lacks a column. Invalid cells are ignored here: opening the dataset
        reports them with their rows.
    """
    file = Path(path).expanduser()
    choice = ColumnChoice(data, responses=responses, references=references)
    if is_whole_parquet(file):
        with readable(file), pq.ParquetFile(file) as table:
            column = parquet_columns(table, file, choice).data_source
            values = set() if column is None else set(table.read(columns=[column])[column].unique().to_pylist())
    else:
        values = {
            record.get(choice.columns.data_source) for record in records(file, choice) if choice.columns.data_source
        }
    if choice.columns.data_source is None:
        return {file.stem}
    return {value for value in values if isinstance(value, str) and value}


def check_files(data: DataConfig, *, needed: bool = True, references: bool = True) -> list[Problem]:
    """Return the problems of the dataset files that can be found without reading them through: existence, kind, columns,
    the first row; with ``needed``, at least one file to train on; without ``references``, rows may lack a reference answer.
    Raises nothing."""
    problems = []
    for field in ("train_files", "validation_files"):
        files = getattr(data, field)
        if field == "train_files" and not files and needed:
            problems.append(Problem("there is no training file", fix="name at least one", field="data.train_files"))
        for path in files:
            choice = ColumnChoice(data, images=ImageRules.of(data), references=references)
            problems += check_file(path, choice, f"data.{field}")
    return list(dict.fromkeys(problems))  # files to train on may be held out, too


def check_file(path: str, choice: ColumnChoice, field: str) -> list[Problem]:
    """Check one file, in which ``choice`` looks for columns and which the setting ``field`` names."""
    record, problems = first_record(path, field, choice)
    if record is None:
        return problems
    row = _row(record, 0, Path(path).expanduser(), choice)
    return [row] if isinstance(row, Problem) else []


# The beginning of a list of chat messages written as JSON text, as in ROLL's files.
_MESSAGES_AS_TEXT = re.compile(r'\s*\[\s*\{\s*"(?:role|content)"\s*:')


class _BadValue(Exception):
    """A cell is invalid; caught in _row, which knows the row."""


def _row(record: Mapping[str, Any], number: int, file: Path, choice: ColumnChoice) -> DatasetRow | Problem:
    """Check a row. Returns: the row, or its first problem."""
    columns = choice.columns
    field, column = "prompt_column", columns.prompt or ""
    images: tuple[ImageFile, ...] = ()
    try:
        messages = _messages(record[column], typed=choice.images is not None) if column else []
        if messages and choice.images is not None:
            field, column = "video_column", columns.videos or ""
            refuse_videos(record.get(column))
            field, column = ("image_column", columns.images) if columns.images else (field, columns.prompt or "")
            messages, images = _with_images(
                messages, record, columns, choice.images.folder or file.parent, choice.images
            )
        field, column = "response_column", columns.responses or ""
        responses = _responses(record[column]) if column else ()
        field, column = "data_source_column", columns.data_source or ""
        source = record[column] if column else file.stem
        if not isinstance(source, str) or not source:
            raise _BadValue(f"holds {described(source)}; the name of a task is expected")
        field, column = "ground_truth_column", columns.ground_truth or ""
        truth = _reference(record, column, choice) if column else None
        field, column = "extra_info_column", columns.extra_info
        extra = record.get(column)
        if extra is not None and not isinstance(extra, Mapping):
            raise _BadValue(f"holds {described(extra)}; a mapping is expected")
    except (_BadValue, BadImage, Unreachable) as error:
        return Problem(f"row {number} of {file.name}: column {column} {error}", field=f"data.{field}")
    return DatasetRow(
        number=number,
        messages=messages,
        data_source=source,
        ground_truth=truth,
        extra_info={
            **(extra or {}),
            **{name: record[name] for name in columns.extra if name in record and name != columns.prompt},
        },
        responses=responses,
        images=images,
    )


def _reference(record: Mapping[str, Any], column: str, choice: ColumnChoice) -> Any:
    """Return the reference answer of a row; None where it may be absent, and is. Raises: Unreachable."""
    try:
        return drill(record, column)
    except Unreachable:
        if choice.may_lack_reference:
            return None
        raise


def _with_images(
    messages: list[dict[str, Any]], record: Mapping[str, Any], columns: Columns, folder: Path, rules: ImageRules
) -> tuple[list[dict[str, Any]], tuple[ImageFile, ...]]:
    """Read the images of a row and place them in its messages. Raises: BadImage."""
    value = record.get(columns.images) if columns.images else None
    found = read_images(value, folder, rules.max_pixels)
    return place_images(messages, found, folder, rules.max_pixels, column=columns.images is not None)


def _responses(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise _BadValue(f"holds {described(value)}; a text or a list of texts is expected")
    if not value:
        raise _BadValue("holds a list of 0 responses; at least one is expected")
    for index, response in enumerate(value):
        if not isinstance(response, str):
            raise _BadValue(f"holds {described(response)} as response {index}; text is expected")
    return tuple(value)


def _messages(prompt: Any, *, typed: bool) -> list[dict[str, Any]]:
    """Return chat messages whose contents are texts or, with ``typed``, lists of typed parts."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise _BadValue("holds an empty text; a question is expected")
        if not _MESSAGES_AS_TEXT.match(prompt):
            return [{"role": "user", "content": prompt}]
        try:
            prompt = json_text.loads(prompt)
        except json.JSONDecodeError as error:
            raise _BadValue(f"holds messages that are not JSON: {error.msg} at character {error.pos}") from error
    if not isinstance(prompt, list):
        raise _BadValue(f"holds {described(prompt)}; a text or a list of chat messages is expected")
    if not prompt:
        raise _BadValue("holds a list of 0 messages; at least one is expected")
    messages = []
    for index, message in enumerate(prompt):
        if not isinstance(message, Mapping):
            raise _BadValue(
                f"holds {described(message)} as message {index}; a mapping with role and content is expected"
            )
        for key in ("role", "content"):
            if not isinstance(message.get(key), (str, list) if typed and key == "content" else str):
                missing = f"holds {described(message[key])} as {key} of message {index}" if key in message else ""
                raise _BadValue((missing or f"has no {key} in message {index}") + "; text is expected")
        # parquet gives every message the keys of all others, with None
        messages.append({key: value for key, value in message.items() if value is not None})
    return messages
