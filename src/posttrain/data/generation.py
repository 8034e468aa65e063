"""Rows of files for generation: the prompt of each, and all columns unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from posttrain.config.data import DataConfig
from posttrain.config.generate import GenerateDataConfig
from posttrain.config.images import ImageSettings
from posttrain.data.columns import ColumnChoice
from posttrain.data.images import ImageRules, PromptImageReader
from posttrain.data.prompts import load_prompts
from posttrain.data.readers import check_file
from posttrain.data.record_files import read_records
from posttrain.errors import DataError, Problem
from posttrain.records.prompts import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRows:
    table: pa.Table  # [rows] every column of the files
    prompts: list[Prompt]  # of the same rows
    notes: list[str]  # messages for the user about truncated prompts


def load_generation(
    data: GenerateDataConfig, tokenizer: PreTrainedTokenizerBase, processor: PromptImageReader | None = None
) -> GenerationRows:
    """Load the rows of all files, concatenated, and their prompts.

    Raises: DataError as ``load_prompts``, and when the columns of several files do not fit one table; ModelError.
    """
    settings = as_data_config(data)
    prompts = load_prompts(data.files, settings, tokenizer, what="prompt", limit=data.max_prompts, processor=processor)
    table = read_table(data.files).slice(0, data.max_prompts)
    assert table.num_rows == len(prompts.prompts), "a row without a prompt, or a prompt without a row"
    return GenerationRows(table=table, prompts=prompts.prompts, notes=prompts.overlong_message("prompt"))


def as_data_config(data: GenerateDataConfig) -> DataConfig:
    """Return the settings common to reading prompts for training and for generation."""
    return DataConfig(
        train_files=data.files,
        prompt_column=data.prompt_column,
        max_prompt_tokens=data.max_prompt_tokens,
        overlong_prompts=data.overlong_prompts,
        templated_prompts=data.templated_prompts,
        chat_template_options=data.chat_template_options,
        **data.model_dump(include=set(ImageSettings.model_fields)),
    )


def check_generation_files(data: GenerateDataConfig, column: str) -> list[Problem]:
    """Return the problems that can be found without reading the files through, among them an existing ``column`` for the
    responses. Raises nothing."""
    problems: list[Problem] = []
    for index, path in enumerate(data.files):
        field = f"data.files.{index}"
        choice = ColumnChoice(as_data_config(data), prompts_only=True, images=ImageRules.of(data))
        found = check_file(path, choice, field)
        problems += found
        if not found and column in columns_of(path):
            fix = "name another with output.column, or take the column out of the file"
            what = f"{path} has a column {column} already"
            problems.append(Problem(what, fix=fix, field="output.column"))
    return problems


def columns_of(path: str) -> list[str]:
    """Return the columns of a file: of a parquet file's schema, or of the first row. Raises: DataError."""
    file = Path(path).expanduser()
    if file.suffix.lower() == ".parquet":
        return list(pq.read_schema(file).names)
    return list(next(read_records(file), {}))


def read_table(files: Sequence[str]) -> pa.Table:
    """Read all columns of all files. A column that a file lacks is null in its rows.

    Raises: DataError when a file cannot be read, its rows do not make a table, or the files' types contradict each other.
    """
    tables = [_table(Path(file).expanduser()) for file in files]
    try:
        return pa.concat_tables(tables, promote_options="default").combine_chunks()
    except pa.ArrowException as error:
        what = f"the columns of {', '.join(Path(file).name for file in files)} do not go into one table: {error}"
        raise DataError(Problem(what, fix="give each file a run of its own", field="data.files")) from error


def _table(file: Path) -> pa.Table:
    if file.suffix.lower() == ".parquet":
        try:
            return pq.read_table(file)
        except (OSError, pa.ArrowException) as error:
            raise DataError(Problem(f"{file} cannot be read: {error}", field="data.files")) from error
    rows: list[dict[str, Any]] = list(read_records(file))
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns: dict[str, Any] = {}
    for name in names:
        try:
            columns[name] = pa.array([row.get(name) for row in rows])
        except (pa.ArrowException, TypeError, OverflowError) as error:
            what = f"column {name} of {file.name} holds values of several kinds, which no parquet column can: {error}"
            raise DataError(
                Problem(what, fix="write them as text, or take the column out", field="data.files")
            ) from error
    return pa.table(columns)
