r"""Conversion of well-known datasets from their published files to the schemas that training reads. Downloads nothing.

The columns are those of verl's preparation scripts, so verl can read the files, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from posttrain.config.data import DataConfig
from posttrain.data.images import BadImage, place_images, read_images
from posttrain.data.readers import MAX_LISTED
from posttrain.data.record_files import described, first_record, read_records
from posttrain.data.transcripts import transcript_turns
from posttrain.errors import DataError, Problem, nearest
from posttrain.libraries import json_text
from posttrain.libraries.folders import make_folder
from posttrain.rewards.scorers.math import boxed_answer

Form = Literal["rl", "sft", "rm"]
Row = dict[str, Any]

MESSAGES = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))


class BadRow(Exception):
    """A row is invalid; holds the column. Caught where the row's number is known."""

    def __init__(self, column: str, what: str):
        super().__init__(what)
        self.column = column


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A dataset: the columns of its files, and the conversion of a row.

    ``row`` receives a published row, the instruction, the split and the row's number, and yields the rows to write, possibly
    several. ``kept`` are columns that are copied unchanged.
    """

    columns: tuple[str, ...]
    instruction: str
    row: Callable[[Row, str, str, int], Iterable[Row]]
    schema: pa.Schema
    kept: tuple[str, ...] = ()


def _rl_schema(*extra: str) -> pa.Schema:
    """Return verl's columns; ``extra`` are the texts in extra_info besides split and index."""
    texts = [(name, pa.string()) for name in extra]
    return pa.schema(
        {
            "data_source": pa.string(),
            "prompt": MESSAGES,
            "ability": pa.string(),
            "reward_model": pa.struct({"style": pa.string(), "ground_truth": pa.string()}),
            "extra_info": pa.struct([("split", pa.string()), ("index", pa.int64()), *texts]),
        }
    )


def _rl_row(source: str, messages: list[Row], ability: str, style: str, truth: str, extra: Row) -> Row:
    return {
        "data_source": source,
        "prompt": messages,
        "ability": ability,
        "reward_model": {"style": style, "ground_truth": truth},
        "extra_info": extra,
    }


def _asked(question: str, instruction: str) -> list[Row]:
    return [{"role": "user", "content": f"{question} {instruction}".strip()}]


def _gsm8k(row: Row, instruction: str, split: str, index: int) -> Iterator[Row]:
    """Convert a row; the reference is the text after the last "#### ", without commas."""
    question, answer = _text(row, "question"), _text(row, "answer")
    _, mark, reference = answer.rpartition("#### ")
    if not mark or not reference.strip():
        raise BadRow("answer", 'holds no "#### " with a number behind it')
    extra = {"split": split, "index": index, "answer": answer, "question": question}
    truth = reference.strip().replace(",", "")
    yield _rl_row("openai/gsm8k", _asked(question, instruction), "math", "rule", truth, extra)


def _math(row: Row, instruction: str, split: str, index: int) -> Iterator[Row]:
    r"""Convert a row; the reference is the content of the solution's last \boxed{…}."""
    problem, solution = _text(row, "problem"), _text(row, "solution")
    truth = boxed_answer(solution)
    if truth is None:
        raise BadRow("solution", r"holds no \boxed{…} that is closed")
    extra = {"split": split, "index": index, "level": row.get("level"), "type": row.get("type")}
    source = "DigitalLearningGmbH/MATH-lighteval"
    yield _rl_row(source, _asked(problem, instruction), "math", "rule", truth, extra)


def _geo3k(row: Row, instruction: str, split: str, index: int) -> Iterator[Row]:
    """Convert a row; the figures stay unchanged, must be images, and must match the number of places in the problem."""
    problem, answer = _text(row, "problem"), _text(row, "answer")
    asked = _asked(problem, instruction)
    try:
        if any(not isinstance(image, Mapping) or not image.get("bytes") for image in row["images"] or ()):
            raise BadImage("holds an image without its bytes; the published files hold them")
        images = read_images(row["images"], Path(), DataConfig.model_fields["max_image_pixels"].default)
        place_images(asked, images, Path(), 0, column=True)
    except BadImage as error:
        raise BadRow("images", str(error)) from error
    extra = {"split": split, "index": index, "answer": answer, "question": problem}
    yield _rl_row("hiyouga/geometry3k", asked, "math", "rule", answer, extra)


def _turns(text: str, column: str) -> list[Row]:
    turns = transcript_turns(text)
    if not turns:
        raise BadRow(column, 'does not begin with "\\n\\nHuman: "')
    return turns


def _pair(row: Row) -> tuple[list[Row], str, str]:
    """Return the messages before the two answers, the chosen and the rejected one, of a row with a prompt or of two transcripts
    that are equal up to their last answer."""
    chosen, rejected = _text(row, "chosen"), _text(row, "rejected")
    if isinstance(row.get("prompt"), str):
        messages = _turns(row["prompt"], "prompt")
        if messages[-1] == {"role": "assistant", "content": ""}:  # the marker before the answer
            messages = messages[:-1]
        if not messages or messages[-1]["role"] != "user":
            raise BadRow("prompt", "does not end with a turn of Human")
        return messages, chosen.strip(), rejected.strip()
    whole, other = _turns(chosen, "chosen"), _turns(rejected, "rejected")
    if whole[-1]["role"] != "assistant" or other[-1]["role"] != "assistant":
        column = "chosen" if whole[-1]["role"] != "assistant" else "rejected"
        raise BadRow(column, "does not end with an answer of Assistant")
    if whole[:-1] != other[:-1]:
        raise BadRow("rejected", "is another conversation than chosen before its last answer")
    if len(whole) == 1:
        raise BadRow("chosen", "holds an answer and no question")
    return whole[:-1], whole[-1]["content"], other[-1]["content"]


def _hh_rl(row: Row, instruction: str, split: str, index: int) -> Iterator[Row]:
    messages, chosen, _ = _pair(row)
    extra = {"split": split, "index": index}
    yield _rl_row("Dahoas/full-hh-rlhf", _instructed(messages, instruction), "alignment", "model", chosen, extra)


def _hh_sft(row: Row, instruction: str, split: str, index: int) -> Iterator[Row]:
    """Convert a row to the chosen answer only: the rejected one is not to be learned."""
    messages, chosen, _ = _pair(row)
    if not chosen:
        raise BadRow("chosen", "holds an empty answer")
    yield {"messages": [*_instructed(messages, instruction), {"role": "assistant", "content": chosen}]}


def _hh_rm(row: Row, instruction: str, split: str, index: int) -> Iterator[Row]:
    messages, chosen, rejected = _pair(row)
    prompt = "".join(
        f"\n\n{'Human' if message['role'] == 'user' else 'Assistant'}: {message['content']}" for message in messages
    )
    yield {"prompt": f"{prompt}\n\nAssistant:", "chosen": chosen, "rejected": rejected}


def _instructed(messages: list[Row], instruction: str) -> list[Row]:
    return [{"role": "system", "content": instruction}, *messages] if instruction else messages


_PAIRS = ("chosen", "rejected")

DATASETS: Mapping[tuple[str, Form], Published] = {
    ("gsm8k", "rl"): Published(
        columns=("question", "answer"),
        instruction='Let\'s think step by step and output the final answer after "####".',
        row=_gsm8k,
        schema=_rl_schema("answer", "question"),
    ),
    ("math", "rl"): Published(
        columns=("problem", "solution"),
        instruction=r"Think step by step, and write the final answer as \boxed{answer}.",
        row=_math,
        schema=_rl_schema("level", "type"),
    ),
    ("geo3k", "rl"): Published(
        columns=("problem", "answer", "images"),
        instruction=r"First think inside <think> and </think>, then write the final answer as \boxed{answer}.",
        row=_geo3k,
        schema=_rl_schema("answer", "question"),
        kept=("images",),
    ),
    ("hh-rlhf", "rl"): Published(columns=_PAIRS, instruction="", row=_hh_rl, schema=_rl_schema()),
    ("hh-rlhf", "sft"): Published(
        columns=_PAIRS, instruction="", row=_hh_sft, schema=pa.schema({"messages": MESSAGES})
    ),
    ("hh-rlhf", "rm"): Published(
        columns=_PAIRS,
        instruction="",
        row=_hh_rm,
        schema=pa.schema({name: pa.string() for name in ("prompt", "chosen", "rejected")}),
    ),
}


def write_published(
    name: str, folder: Path, splits: Mapping[str, Path], *, form: Form = "rl", instruction: str | None = None
) -> list[Path]:
    """Write SPLIT.parquet into ``folder`` (created if absent) for every split: its published file, or a folder with one JSON
    file per row. Old files are replaced once all new ones are complete.

    Args: ``instruction`` is appended to every question (prepended to a conversation, as a system message); None is the
        dataset's own.
    Returns: the files, in the order of the splits.
    Raises: DataError with the first bad rows of all files.
    """
    dataset = DATASETS[name, form]
    wanted = dataset.instruction if instruction is None else instruction
    tables, problems = {}, []
    for split, path in splits.items():
        try:
            tables[folder / f"{split}.parquet"] = _table(dataset, path, split, wanted)
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    make_folder(folder)
    for path, table in tables.items():
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        pq.write_table(table, beside)
        beside.replace(path)
    return list(tables)


def _table(dataset: Published, path: Path, split: str, instruction: str) -> pa.Table:
    rows: list[Row] = []
    problems: list[Problem] = []
    for index, row in enumerate(_published_rows(path)):
        try:
            _check_columns(dataset, row, path)
            rows += [
                {**{name: row[name] for name in dataset.kept}, **made}
                for made in dataset.row(row, instruction, split, index)
            ]
        except BadRow as error:
            problems.append(Problem(f"row {index} of {path.name}: column {error.column} {error}"))
            if len(problems) == MAX_LISTED:
                break
    if problems:
        raise DataError(problems)
    if not rows:
        raise DataError(Problem(f"{path} holds no rows"))
    schema = dataset.schema
    for name in dataset.kept:  # the type is the file's, or inferred from the values
        kind = _kind_of(path, name)
        schema = schema.append(pa.field(name, kind if kind is not None else pa.array([row[name] for row in rows]).type))
    return pa.Table.from_pylist(rows, schema=schema)


def _kind_of(path: Path, column: str) -> pa.DataType | None:
    return pq.read_schema(path).field(column).type if path.suffix.lower() == ".parquet" else None


def _published_rows(path: Path) -> Iterator[Row]:
    if path.is_dir():
        files = sorted(path.rglob("*.json"))
        if not files:
            raise DataError(Problem(f"there is no .json file in {path}"))
        for file in files:
            try:
                row = json_text.loads(file.read_text(encoding="utf-8"))
            except ValueError as error:
                raise DataError(Problem(f"{file} is not JSON: {error}")) from error
            if not isinstance(row, dict):
                raise DataError(Problem(f"{file} holds {described(row)}; an object is expected"))
            yield row
        return
    _, problems = first_record(str(path), "")
    if problems:
        raise DataError(problems)
    yield from read_records(path)


def _check_columns(dataset: Published, row: Row, path: Path) -> None:
    missing = [name for name in dataset.columns if name not in row]
    if missing:
        guess = nearest(missing[0], list(row))
        fix = f"is it {guess}?" if guess else "give the files as they are published"
        what = f"{path.name} has no column {missing[0]} (columns: {', '.join(row)})"
        raise DataError(Problem(what, fix=fix))


def _text(row: Row, column: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise BadRow(column, f"holds {described(value)}; a text is expected")
    if not value.strip():
        raise BadRow(column, "holds an empty text")
    return value
