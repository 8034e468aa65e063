"""Rows of a preference dataset: a prompt with a better and a worse completion, or with one that is good or bad.

Needs neither torch nor transformers. Rows are counted from 0. Column names and forms are those of TRL, verl and ROLL: completions
are texts or lists of chat messages; a list may begin with the prompt, which is then what both sides have in common. A transcript
("\\n\\nHuman: …\\n\\nAssistant: …") is read as such a list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.config.tune import TuneConfig, TuneDataConfig, TuneMethodConfig
from posttrain.data.cells import (
    BadCell,
    Message,
    answer_of,
    from_json,
    is_chat_text,
    messages_of,
    missing_column,
    optional_text,
    text_of,
    value_at,
)
from posttrain.data.columns import root
from posttrain.data.images import BadImage, ImageFile
from posttrain.data.preference_images import only_texts, unread_images, with_images
from posttrain.data.preference_values import label_of, number_of, reference_of
from posttrain.data.readers import MAX_LISTED
from posttrain.data.record_files import Record, count_rows, described, first_record, kind_of, read_records
from posttrain.data.shared_prompts import Completion, apart, prompt_in_texts, texts_apart
from posttrain.data.transcripts import is_transcript, transcript_turns
from posttrain.errors import DataError, Problem

PROMPT = ("prompt", "question", "instruction", "conversations", "input")
COMPLETION = ("completion", "response", "answer", "messages")
LABEL = ("label", "kto_tag")  # the second is LLaMA-Factory's
CHOSEN, REJECTED, MARGIN = "chosen", "rejected", "margin"
CHECKED_ROWS = 20_000  # of a parquet file, before a run; opening the dataset checks all


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceRow:
    """One checked row."""

    number: int  # in its file
    prompt: list[Message]
    completions: tuple[Completion, ...]  # (chosen, rejected), or one; each begins with an assistant's message
    desirable: bool = True
    margin: float = 0.0
    ref_logps: tuple[float, ...] | None = None
    tools: list[Any] | None = None
    images: tuple[ImageFile, ...] = ()  # of the prompt, in the order of its image parts


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceColumns:
    """The columns of one file. Dots reach into nested columns."""

    prompt: str | None  # None: the completions begin with it
    chosen: str | None = None
    rejected: str | None = None
    completion: str | None = None
    label: str | None = None
    margin: str | None = None
    in_texts: bool = False  # the prompt is the words that both sides begin with


def read_preference_rows(path: str, data: TuneDataConfig, method: TuneMethodConfig) -> Iterator[PreferenceRow]:
    """Yield the rows of one file, in order; a pair is two rows for a method that learns single completions.

    Raises: DataError when the file cannot be read, lacks a column, or with the first bad rows (at most MAX_LISTED).
    """
    problems: list[Problem] = []
    for found in checked_preference_rows(path, data, method):
        if isinstance(found, Problem):
            problems.append(found)
            if len(problems) == MAX_LISTED:
                break
        elif not problems:
            yield from found
    if problems:
        raise DataError(problems)


def checked_preference_rows(
    path: str, data: TuneDataConfig, method: TuneMethodConfig
) -> Iterator[Sequence[PreferenceRow] | Problem]:
    """Yield what every row of a file gives: its rows, or its problem. Raises: DataError when it cannot be read."""
    file = Path(path).expanduser()
    columns: PreferenceColumns | None = None
    for number, record in enumerate(read_records(file)):
        columns = columns or choose_preference_columns(record, data, method, file.name)
        yield rows_of(record, number, file, columns, data, method)


def check_preference_files(config: TuneConfig) -> tuple[list[Problem], int, int]:
    """Check the files before the model is loaded: all rows of a text file, the first CHECKED_ROWS of a parquet file. Returns:
    problems, and the rows of training and validation files."""
    problems: list[Problem] = []
    counts = [0, 0]
    for index, name in enumerate(("train_files", "validation_files")):
        for path in getattr(config.data, name):
            record, found = first_record(path, f"data.{name}", read=config.data.dataset_class_file is None)
            problems += found
            if record is None:
                continue
            try:
                rows, bad = _check_file(path, config)
            except DataError as error:
                problems += error.problems
            else:
                counts[index] += rows
                problems += bad
    return problems, counts[0], counts[1]


def _check_file(path: str, config: TuneConfig) -> tuple[int, list[Problem]]:
    """Count what the rows of a file give, and check them."""
    is_table = kind_of(Path(path)) == "parquet"
    problems: list[Problem] = []
    rows = 0
    for read, found in enumerate(checked_preference_rows(path, config.data, config.method), start=1):
        if isinstance(found, Problem):
            problems.append(found)
        else:
            rows += len(found)
        if len(problems) == MAX_LISTED or (is_table and read == CHECKED_ROWS):
            return count_rows(path) * max(rows // read, 1), problems
    return rows, problems


def choose_preference_columns(
    record: Record, data: TuneDataConfig, method: TuneMethodConfig, place: str
) -> PreferenceColumns:
    """Choose the columns, from the configuration or by the usual names.

    Raises: DataError with every missing column and the nearest existing one.
    """
    problems: list[Problem] = []

    def chosen(field: str, usual: Sequence[str], what: str, *, optional: bool = False) -> str | None:
        named: str | None = getattr(data, field)
        column = named or next((name for name in usual if name in record), None)
        if column is None and not optional:
            text = f"{place} has no column {' or '.join(usual)} (it has {', '.join(record)})"
            problems.append(Problem(text, fix=f"name the column of {what}: data.{field}", field=f"data.{field}"))
        elif column is not None and column not in record and root(column) not in record:
            problems.append(missing_column(column, record, place, field))
        return column

    labelled = any(name in record for name in LABEL) and any(name in record for name in COMPLETION)
    pairs = method.paired or (data.label_column is None and not labelled and CHOSEN in record)
    found: dict[str, str | None] = {}
    in_texts = False
    if pairs:
        found["chosen"] = chosen("chosen_column", [CHOSEN], "the better completion")
        found["rejected"] = chosen("rejected_column", [REJECTED], "the worse completion")
        if found["chosen"] == found["rejected"] is not None:
            text = f"both sides of a pair are read from column {found['chosen']}, so every pair has equal sides"
            problems.append(Problem(text, fix="name the column of the worse completion", field="data.rejected_column"))
        if "margins" in method.about.inputs:
            found["margin"] = chosen("margin_column", [MARGIN], "the margin", optional=True)
        first = record.get(found["chosen"] or "")
        in_texts = prompt_in_texts(record, found["chosen"], found["rejected"])
    else:
        found["completion"] = chosen("response_column", COMPLETION, "the completion")
        found["label"] = chosen("label_column", LABEL, "the label")
        first = record.get(found["completion"] or "")
    begins = isinstance(first, list) or (isinstance(first, str) and not _is_plain(first))
    found["prompt"] = chosen("prompt_column", PROMPT, "the prompt", optional=begins or in_texts)
    for field in ("query_column", "system_column"):
        chosen(field, [], "", optional=True)
    for column in data.reference_columns or ():
        if column not in record:
            problems.append(missing_column(column, record, place, "reference_columns"))
    if problems:
        raise DataError(problems)
    return PreferenceColumns(**found, in_texts=in_texts and not begins and found["prompt"] is None)


def prompts_in_texts(config: TuneConfig) -> Iterator[str]:
    """Yield a warning per file whose pairs have no column with the prompt; see ``shared_prompts.texts_apart``."""
    for path in dict.fromkeys((*config.data.train_files, *config.data.validation_files)):
        record, _ = first_record(path, "data.train_files", read=config.data.dataset_class_file is None)
        with suppress(DataError):  # reported where the rows are checked
            if record and choose_preference_columns(record, config.data, config.method, path).in_texts:
                yield f"{Path(path).name} has no column with the prompt: it is the words that both sides of a pair begin with"


def rows_of(
    record: Record,
    number: int,
    file: Path,
    columns: PreferenceColumns,
    data: TuneDataConfig,
    method: TuneMethodConfig,
) -> Sequence[PreferenceRow] | Problem:
    """Check a row. Returns: what it gives, or its first problem."""
    at = _Place()
    try:
        row = _row(record, number, columns, data, at, file.parent)
    except (BadCell, BadImage) as error:
        return Problem(f"row {number} of {file.name}: column {at.column} {error}", field=f"data.{at.field}")
    if columns.chosen is None or method.paired:
        return [row]
    ref_logps = [None, None] if row.ref_logps is None else [(value,) for value in row.ref_logps]
    return [
        replace(row, completions=(side,), desirable=good, ref_logps=ref)
        for side, good, ref in zip(row.completions, (True, False), ref_logps, strict=True)
    ]


class _Place:
    """The cell that is being read."""

    column, field = "", ""

    def read(self, record: Record, column: str, field: str) -> Any:
        self.column, self.field = column, field
        return value_at(record, column)


def _row(
    record: Record, number: int, columns: PreferenceColumns, data: TuneDataConfig, at: _Place, folder: Path
) -> PreferenceRow:
    if column := unread_images(record, data):
        at.column, at.field = column, "image_column"
        raise BadCell(f"holds images that are not read; set data.image_column={column}, or null to leave them out")
    typed = data.image_column is not None
    if columns.chosen is not None:
        assert columns.rejected is not None, "the columns of a pair come together"
        sides = [
            _completion(at.read(record, columns.chosen, "chosen_column"), typed=typed),
            _completion(at.read(record, columns.rejected, "rejected_column"), typed=typed),
        ]
        if sides[0] == sides[1]:
            raise BadCell(f"holds the same as column {columns.chosen}; a pair needs a better and a worse side")
    else:
        assert columns.completion is not None, "a single completion has a column"
        sides = [_completion(at.read(record, columns.completion, "response_column"), typed=typed)]
    whole = sides[0][0]["role"] != "assistant"
    prompt = None
    if not whole:
        if columns.in_texts:
            prompt, sides = texts_apart(sides)
            prompt = _with_system(prompt, record, data, at)
        elif columns.prompt is None:
            raise BadCell("begins with an assistant's message, and there is no column with the prompt")
        else:
            prompt = _prompt(record, columns.prompt, data, at)
        # The answers to a transcript begin with the blank behind "Assistant:".
        if columns.prompt is not None and is_transcript(str(value_at(record, columns.prompt))):
            sides = [[{**message, "content": str(message["content"]).strip()} for message in side] for side in sides]
    else:
        prompt, sides = apart(sides)
        prompt = _with_system(prompt, record, data, at)
    fields = ("chosen_column", "rejected_column") if columns.chosen is not None else ("response_column",)
    for side, name, field in zip(sides, _names(columns), fields, strict=True):
        at.column, at.field = name, field
        if not side or side[0]["role"] != "assistant":
            raise BadCell("holds no assistant's message behind the prompt, so there is nothing to compare")
        only_texts(side)
    if data.image_column in record:
        at.column, at.field = data.image_column or "", "image_column"
    else:
        at.column, at.field = columns.prompt or _names(columns)[0], "prompt_column"
    prompt, images = with_images(prompt, record, data, folder)
    if images and any(len(side) > 1 for side in sides):
        raise BadCell("belongs to a completion of several messages; with images it is one message")
    tools = from_json(record.get(data.tools_column))
    if tools not in (None, "") and not isinstance(tools, list):
        at.column, at.field = data.tools_column, "tools_column"
        raise BadCell(f"holds {described(tools)}; a list of tools is expected")
    if images and tools:
        raise BadCell(f"stands beside tools in column {data.tools_column}; a row has images or tools")
    return PreferenceRow(
        number=number,
        prompt=prompt,
        completions=tuple(sides),
        desirable=_label(record, columns.label, at),
        margin=_margin(record, columns.margin, at),
        ref_logps=_reference(record, data, len(sides), at),
        tools=tools or None,
        images=images,
    )


def _names(columns: PreferenceColumns) -> list[str]:
    return [name for name in (columns.chosen, columns.rejected, columns.completion) if name is not None]


def _completion(value: Any, *, typed: bool = False) -> Completion:
    """The messages of a cell; a text is one message of the assistant, unless it is a transcript."""
    if isinstance(value, str) and _is_plain(value):
        return [{"role": "assistant", "content": text_of(value)}]
    if isinstance(value, Mapping):  # a message alone
        value = [value]
    parsed = transcript_turns(value) if isinstance(value, str) and is_transcript(value) else from_json(value)
    if not isinstance(parsed, list):
        return [{"role": "assistant", "content": answer_of(value)}]
    messages = messages_of(parsed, typed=typed)
    if messages[-1]["role"] != "assistant":
        raise BadCell(f"ends with a message of the {messages[-1]['role']}; a completion ends with the assistant's")
    last = messages[-1]
    if not last.get("tool_calls") and not str(last.get("content", "")).strip():
        raise BadCell("holds an empty text")
    return messages


def _is_plain(text: str) -> bool:
    """True for a text that is neither a list of messages as JSON nor a transcript."""
    return not is_chat_text(text) and not is_transcript(text)


def _prompt(record: Record, column: str, data: TuneDataConfig, at: _Place) -> list[Message]:
    value = at.read(record, column, "prompt_column")
    text = isinstance(value, str) and _is_plain(value)
    if value is None:
        raise BadCell("holds nothing; a text or a list of chat messages is expected")
    if isinstance(value, str) and is_transcript(value):
        messages = transcript_turns(value)
        if messages[-1] == {"role": "assistant", "content": ""}:  # the marker before the answer
            messages = messages[:-1]
    else:
        given = [value] if isinstance(value, Mapping) else value  # a message alone
        messages = (
            [{"role": "user", "content": text_of(value)}]
            if text
            else messages_of(from_json(given), typed=data.image_column is not None)
        )
    if messages[-1]["role"] == "assistant":
        raise BadCell("ends with an assistant message; a prompt ends before the answer")
    at.column, at.field = data.query_column or "", "query_column"
    if query := optional_text(record, data.query_column):
        if not text:
            raise BadCell("adds to a prompt that is a list of messages; a text is expected there")
        messages = [{"role": "user", "content": f"{value}\n{query}"}]
    messages = _with_system(messages, record, data, at)
    at.column, at.field = column, "prompt_column"
    return messages


def _with_system(messages: list[Message], record: Record, data: TuneDataConfig, at: _Place) -> list[Message]:
    at.column, at.field = data.system_column or "", "system_column"
    system = optional_text(record, data.system_column)
    if not system:
        return messages
    if messages[0]["role"] in ("system", "developer"):
        raise BadCell("is a second system message: the prompt begins with one")
    return [{"role": "system", "content": system}, *messages]


def _label(record: Record, column: str | None, at: _Place) -> bool:
    if column is None:
        return True
    return label_of(at.read(record, column, "label_column"))


def _margin(record: Record, column: str | None, at: _Place) -> float:
    if column is None:
        return 0.0
    return number_of(at.read(record, column, "margin_column"))


def _reference(record: Record, data: TuneDataConfig, sides: int, at: _Place) -> tuple[float, ...] | None:
    if data.reference_columns is None:
        return None
    at.column, at.field = ", ".join(data.reference_columns), "reference_columns"
    if len(data.reference_columns) != sides:
        raise BadCell(f"stands in a row of {sides} completions, and data.reference_columns has another number")
    return reference_of([at.read(record, column, "reference_columns") for column in data.reference_columns])
