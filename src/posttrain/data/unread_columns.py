"""Columns whose usual names say that they are part of a prompt, and that no setting reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from posttrain.config.sft import TextDataConfig
from posttrain.data.record_files import first_record
from posttrain.data.sft_rows import MESSAGES

MORE_OF_A_PROMPT = {"system": "system_column", "system_prompt": "system_column", "input": "query_column"}


def unread_columns(data: TextDataConfig, prompts: Sequence[str]) -> Iterator[str]:
    """Yield a warning per column of a file that nothing reads, in sentences; files that cannot be read have their own problems.

    Args: ``prompts``: usual names of a prompt's column, of which the first in the file is read.
    """
    if data.dataset_class_file is not None:
        return
    for path in dict.fromkeys((*data.train_files, *data.validation_files)):
        record, _ = first_record(path, "data.train_files")
        if record is None:
            continue
        if data.messages_column is not None or MESSAGES in record:
            named = data.system_column
            if named not in (None, "system") and named not in record and data.prompt_column is None:
                yield f"{Path(path).name} has no column {named}, which data.system_column names"
        if data.messages_column is not None:
            continue
        prompt = data.prompt_column or next((name for name in prompts if name in record), None)
        conversations = MESSAGES in record and data.prompt_column is None and data.response_column is None
        if prompt is None or (conversations and MESSAGES not in prompts):
            continue
        for column, field in MORE_OF_A_PROMPT.items():
            used = prompt == column or getattr(data, field) is not None
            if not used and isinstance(record.get(column), str):
                yield f"column {column} of {Path(path).name} is not read; data.{field}={column} makes it part of the prompt"
