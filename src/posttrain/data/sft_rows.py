"""Rows of a dataset for supervised fine-tuning: a prompt with its response, a whole conversation, or tokens.

Needs neither torch nor transformers. Rows are counted from 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.config.sft import SftDataConfig, TextDataConfig
from posttrain.data.cells import (
    BadCell,
    Message,
    answer_of,
    from_json,
    messages_of,
    missing_column,
    optional_text,
    text_of,
    value_at,
    without_none,
)
from posttrain.data.columns import root
from posttrain.data.readers import MAX_LISTED
from posttrain.data.record_files import Record, described, first_record, read_records
from posttrain.errors import ConfigError, DataError, Problem
from posttrain.user_files import source_file

MESSAGES = "messages"
IMAGES = ("images", "image")  # columns of vision datasets, which only RL supports here
PROMPT = ("prompt", "question")
RESPONSE = ("response", "answer")
# Alpaca's columns: a row is a conversation of two messages, of which the first may have more text below an empty line
ALPACA = ("instruction", "output")
ALPACA_MORE = "input"
TOKENS = ("input_ids", "loss_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class SftRow:
    """One checked row. With a response, ``messages`` is its prompt; without one, ``messages`` is a whole conversation, whose
    assistant messages are learned."""

    number: int  # in its file
    messages: list[Message] = dataclasses.field(default_factory=list)
    response: str | None = None
    tools: list[Any] | None = None
    variables: Mapping[str, Any] | None = None  # of the chat template, for this row only
    # Of a row that is tokens already: ids, and 1 for those that are learned
    tokens: tuple[list[int], list[int]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SftColumns:
    """The columns of one file: ``messages``, or ``prompt`` and ``response``, or those of ``alpaca``, or of ``tokens``. Dots reach
    into nested columns."""

    messages: str | None = None
    alpaca: bool = False
    tokens: bool = False
    prompt: str = ""
    response: str = ""


def read_sft_rows(path: str, data: SftDataConfig, *, tokenized: bool = False) -> Iterator[SftRow]:
    """Yield the rows of one file, in order. Args: ``tokenized``, it holds tokens.

    Raises: DataError when the file cannot be read, lacks a column, or with the first bad rows (at most MAX_LISTED).
    """
    file = Path(path).expanduser()
    columns: SftColumns | None = None
    problems: list[Problem] = []
    for number, record in enumerate(read_records(file)):
        columns = columns or choose_columns(record, data, file.name, tokenized=tokenized)
        row = row_of(record, number, file.name, columns, data)
        if isinstance(row, Problem):
            problems.append(row)
            if len(problems) == MAX_LISTED:
                break
        elif not problems:
            yield row
    if problems:
        raise DataError(problems)


def check_sft_files(data: SftDataConfig) -> list[Problem]:
    """Return the problems that can be found in the files' first rows; raises nothing. Files for a user's own dataset class are
    only checked for existence."""
    problems: list[Problem] = []
    for name in ("train_files", "validation_files"):
        for path in getattr(data, name):
            record, found = first_record(path, f"data.{name}", read=data.dataset_class_file is None)
            problems += found
            if record is None:
                continue
            try:
                columns = choose_columns(record, data, Path(path).name, tokenized=is_tokenized(data, name))
            except DataError as error:
                problems += error.problems
                continue
            row = row_of(record, 0, Path(path).name, columns, data)
            problems += [row] if isinstance(row, Problem) else []
    return problems + own_class_file_problems(data)


def is_tokenized(data: SftDataConfig, field: str) -> bool:
    """True where the files of train_files or validation_files hold tokens."""
    return data.train_tokenized if field == "train_files" else data.validation_tokenized


def own_class_file_problems(data: TextDataConfig) -> list[Problem]:
    """Return the problem of a dataset class whose file, or module (pkg://package.module), is not there."""
    if data.dataset_class_file is None:
        return []
    try:
        source_file(data.dataset_class_file, holds="your dataset class")
    except ConfigError as error:
        return [dataclasses.replace(each, field="data.dataset_class_file") for each in error.problems]
    return []


def choose_columns(record: Record, data: SftDataConfig, place: str, *, tokenized: bool = False) -> SftColumns:
    """Choose the columns that hold the texts, from the configuration or by the usual names; of rows of tokens, theirs.

    Raises: DataError with every missing column and the nearest existing one.
    """
    if tokenized:
        if absent := [name for name in TOKENS if name not in record]:
            what = f"{place} has no column {' and no column '.join(absent)} (it has {', '.join(record)})"
            fix = "rows of tokens have input_ids, and loss_mask of the same length with 1 for tokens that are learned"
            raise DataError(Problem(what, fix=fix))
        return SftColumns(tokens=True)
    pairs = data.prompt_column is not None or data.response_column is not None
    messages = data.messages_column or (MESSAGES if MESSAGES in record and not pairs else None)
    if messages is not None:
        if data.query_column is not None:
            what = f"data.query_column adds to a column of prompts, and {place} holds whole conversations in {messages}"
            fix = "name the columns of prompt and response, or remove it"
            raise DataError(Problem(what, fix=fix, field="data.query_column"))
        if root(messages) not in record:
            raise DataError(missing_column(messages, record, place, "messages_column"))
        return SftColumns(messages=messages)
    usual_names = {*PROMPT, *RESPONSE} & set(record)
    named = data.query_column is not None or data.system_column in record
    if not (pairs or named or usual_names) and set(ALPACA) <= set(record):
        return SftColumns(alpaca=True)
    problems: list[Problem] = []
    found: dict[str, str] = {}
    for kind, usual in (("prompt", PROMPT), ("response", RESPONSE)):
        field = f"{kind}_column"
        named = getattr(data, field)
        column = named or next((name for name in usual if name in record), None)
        if column is None:
            what = f"{place} has no column {' or '.join(usual)} (it has {', '.join(record)})"
            problems.append(Problem(what, fix=f"name the column of the {kind}: data.{field}", field=f"data.{field}"))
        elif column not in record and root(column) not in record:
            problems.append(missing_column(column, record, place, field))
        found[kind] = column or ""
    for field in ("query_column", "system_column"):
        column = getattr(data, field)
        if column is not None and column not in record and root(column) not in record:
            problems.append(missing_column(column, record, place, field))
    if problems:
        raise DataError(problems)
    return SftColumns(prompt=found["prompt"], response=found["response"])


def row_of(record: Record, number: int, place: str, columns: SftColumns, data: SftDataConfig) -> SftRow | Problem:
    """Check a row. Returns: the row, or its first problem."""
    if columns.tokens:
        return _tokens_row(record, number, place)
    if column := image_column(record):
        what = f"row {number} of {place}: column {column} holds images, and fine-tuning reads text only"
        return Problem(what, fix="leave the row out, or rename the column to train on the text alone")
    field, column = "messages_column", columns.messages or ""
    try:
        if columns.messages is not None:
            return _conversation(record, number, columns.messages, data)
        if columns.alpaca:
            return _alpaca(record, number)
        field, column = "prompt_column", columns.prompt
        prompt = value_at(record, columns.prompt)
        messages = (
            messages_of(prompt) if not isinstance(prompt, str) else [{"role": "user", "content": text_of(prompt)}]
        )
        field, column = "query_column", data.query_column or ""
        if query := optional_text(record, data.query_column):
            if not isinstance(prompt, str):
                raise BadCell("adds to a prompt that is a list of messages; a text is expected there")
            messages = [{"role": "user", "content": f"{text_of(prompt)}\n{query}"}]
        field, column = "system_column", data.system_column or ""
        if system := optional_text(record, data.system_column):
            if messages[0]["role"] in ("system", "developer"):
                raise BadCell("is a second system message: the prompt begins with one")
            messages = [{"role": "system", "content": system}, *messages]
        field, column = "prompt_column", columns.prompt
        if messages[-1]["role"] == "assistant":
            raise BadCell("ends with an assistant message; a prompt ends before the answer")
        field, column = "response_column", columns.response
        return SftRow(number=number, messages=messages, response=answer_of(value_at(record, columns.response)))
    except BadCell as error:
        return Problem(f"row {number} of {place}: column {column} {error}", field=f"data.{field}")


def image_column(record: Record) -> str | None:
    """Return the column that holds a row's images. A text in ``image`` may be anything, such as a link that is not used."""
    held = (name for name in IMAGES if record.get(name) and (name == IMAGES[0] or not isinstance(record[name], str)))
    return next(held, None)


def _conversation(record: Record, number: int, column: str, data: SftDataConfig) -> SftRow:
    messages = messages_of(from_json(value_at(record, column)))
    system = optional_text(record, data.system_column if data.system_column in record else None)
    if system and messages[0]["role"] not in ("system", "developer"):
        messages = [{"role": "system", "content": system}, *messages]
    if not any(message["role"] == "assistant" for message in messages):
        raise BadCell("holds no assistant message, so there is nothing to learn")
    tools = from_json(record.get(data.tools_column))
    if tools is not None and not isinstance(tools, list):
        raise BadCell(f"comes with {described(tools)} in column {data.tools_column}; a list of tools is expected")
    thinking = record.get(data.enable_thinking_column)
    if thinking is not None and not isinstance(thinking, bool):
        raise BadCell(
            f"comes with {described(thinking)} in column {data.enable_thinking_column}; true or false is expected"
        )
    variables = None if thinking is None else {"enable_thinking": thinking}
    return SftRow(number=number, messages=messages, tools=without_none(tools) or None, variables=variables)


def _alpaca(record: Record, number: int) -> SftRow:
    asked, more = (record.get(name) or "" for name in (ALPACA[0], ALPACA_MORE))
    if not all(isinstance(text, str) for text in (asked, more)):
        raise BadCell(f"holds {described(record.get(ALPACA[0]))} in {ALPACA[0]}; a text is expected")
    question = text_of((f"{asked}\n\n{more}" if more else asked).strip())
    answer = answer_of(record[ALPACA[1]])
    return SftRow(
        number=number,
        messages=[{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
    )


def _tokens_row(record: Record, number: int, place: str) -> SftRow | Problem:
    """Check a row of tokens; nothing in it means a row without tokens, which is left out later."""
    columns = {name: record.get(name) or [] for name in (*TOKENS, "attention_mask")}
    for name, cell in columns.items():
        if not isinstance(cell, list) or not all(isinstance(each, int) and each >= 0 for each in cell):
            found = described(cell)
            return Problem(f"row {number} of {place}: column {name} holds {found}; a list of whole numbers is expected")
    ids, mask, there = columns.values()
    if len(ids) != len(mask):
        what = f"row {number} of {place}: loss_mask has {len(mask)} values for {len(ids)} input_ids"
        return Problem(what, fix="write a 0 or 1 for each token, also of the prompt")
    if any(each > 1 for each in mask):
        return Problem(f"row {number} of {place}: loss_mask holds {max(mask)}; it is 0 or 1")
    if not all(there):
        what = f"row {number} of {place}: attention_mask holds 0, and rows are stored without padding"
        return Problem(what, fix="remove the padding from input_ids and loss_mask")
    return SftRow(number=number, tokens=(ids, mask))
