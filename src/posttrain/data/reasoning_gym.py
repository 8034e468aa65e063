"""Datasets of reasoning-gym tasks, in verl's parquet schema."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from posttrain.errors import ConfigError, DataError, Problem
from posttrain.libraries import reasoning_gym as library
from posttrain.libraries.folders import make_folder

SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "ability": pa.string(),
        "reward_model": pa.struct({"style": pa.string(), "ground_truth": pa.string()}),
        "extra_info": pa.struct(
            {
                "split": pa.string(),
                "index": pa.int64(),
                "task": pa.string(),
                # JSON text of question, answer and metadata, for the verifier
                "entry": pa.string(),
                "options": pa.string(),  # JSON text
            }
        ),
    }
)


def write_dataset(
    task: str,
    folder: Path,
    *,
    train_rows: int,
    validation_rows: int,
    seed: int,
    options: Mapping[str, Any],
    instruction: str | None,
) -> tuple[Path, Path]:
    """Write train.parquet and validation.parquet of one task into ``folder`` (created if absent; old files are replaced).

    No question occurs twice, neither in one file nor across both. The validation questions are drawn first, so they stay the
    same when more training rows are requested. The same arguments give the same rows.

    Args: ``options`` are the task's own (chain_sum: min_terms, …); ``instruction`` becomes a system message.
    Returns: the two paths, training first.
    Raises: ConfigError for an unknown task or option, or a task that cannot be scored here; DataError when the task does not
    have that many different questions; MissingDependency without reasoning-gym.
    """
    short = [
        Problem(f"{name} is {rows}", fix="use at least 1")
        for name, rows in (("train_rows", train_rows), ("validation_rows", validation_rows))
        if rows < 1
    ]
    if short:
        raise ConfigError(short)
    library.check_scorable(task)
    entries = _distinct_entries(task, train_rows + validation_rows, seed, options)
    splits = {"train": entries[validation_rows:], "validation": entries[:validation_rows]}
    make_folder(folder)
    tables = {
        folder / f"{split}.parquet": pa.Table.from_pylist(
            [_row(task, split, index, entry, options, instruction) for index, entry in enumerate(rows)], schema=SCHEMA
        )
        for split, rows in splits.items()
    }
    _write_together(tables)
    train, validation = tables
    return train, validation


def _distinct_entries(task: str, count: int, seed: int, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the first ``count`` entries with different questions.

    Drawing stops after 1000 + 10 x (questions found) draws in a row without a new question: with one of n equally likely
    questions still unseen, that happens with probability below e^-10.
    """
    found: dict[str, dict[str, Any]] = {}
    draws_without_new = 0
    for entry in library.entries(task, seed=seed, options=options):
        if entry["question"] in found:
            draws_without_new += 1
        else:
            found[entry["question"]] = entry
            draws_without_new = 0
        if len(found) == count:
            break
        if draws_without_new >= 1000 + 10 * len(found):
            raise DataError(
                Problem(
                    f"{task} with options {dict(options)} has only {len(found)} different questions; {count} are requested "
                    "(training and validation together)",
                    fix="ask for fewer rows, or widen the task's options",
                )
            )
    return list(found.values())


def _row(
    task: str, split: str, index: int, entry: Mapping[str, Any], options: Mapping[str, Any], instruction: str | None
) -> dict[str, Any]:
    system = [{"role": "system", "content": instruction}] if instruction else []
    return {
        "data_source": f"reasoning_gym/{task}",
        "prompt": [*system, {"role": "user", "content": entry["question"]}],
        "ability": library.category(task),
        # None where only the verifier can decide.
        "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
        "extra_info": {
            "split": split,
            "index": index,
            "task": task,
            "entry": library.entry_to_text(entry),
            "options": json.dumps(dict(options), sort_keys=True),
        },
    }


def _write_together(tables: Mapping[Path, pa.Table]) -> None:
    """Write all files to temporary names, then rename them, so that no incomplete file is left."""
    written: list[tuple[Path, Path]] = []
    try:
        for path, table in tables.items():
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            written.append((temporary, path))
            pq.write_table(table, temporary)
        for temporary, path in written:
            temporary.replace(path)
    finally:
        for temporary, _ in written:
            temporary.unlink(missing_ok=True)
