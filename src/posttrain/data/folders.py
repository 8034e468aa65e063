"""Folders of dataset files, read as one: what ``Dataset.save_to_disk`` writes, or files of one kind.

Source: SkyRL, skyrl/train/dataset/pretokenized.py (which folders it reads); the names in state.json are those of ``datasets``.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from posttrain.errors import DataError, Problem
from posttrain.libraries import json_text

_STATE = "state.json"  # of Dataset.save_to_disk: the names of its files, beside which lie those of a cache
_SPLITS = "dataset_dict.json"  # of DatasetDict.save_to_disk: each split is a folder with a state.json
_ALIKE = {".json": ".jsonl"}


def files_of_folder(folder: Path, kinds: Collection[str]) -> list[Path]:
    """List the data files of a folder and the folders in it, by name; hidden ones are left out.

    Args: ``kinds``, such as .parquet. Raises: DataError when there are none, files of several kinds, several splits, or a model.
    """
    if (folder / _STATE).is_file():
        return _saved(folder)
    if (folder / _SPLITS).is_file():
        splits = sorted(str(each.parent) for each in folder.glob(f"*/{_STATE}"))
        what = f"{folder} holds the splits of a data set that was saved to disk, not one of them"
        raise DataError(Problem(what, fix=f"name one: {', '.join(splits)}" if splits else "save it again"))
    if (folder / "config.json").is_file():
        what = f"{folder} is a folder of a model: it has a config.json"
        raise DataError(Problem(what, fix=f"name files of rows: {', '.join(kinds)}"))
    found = [
        file
        for file in sorted(folder.rglob("*"))
        if file.is_file()
        and file.suffix.lower() in kinds
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]
    held = sorted({_ALIKE.get(kind, kind) for kind in (file.suffix.lower() for file in found)})
    if not found:
        raise DataError(Problem(f"{folder} is a folder without data files", fix=f"name files: {', '.join(kinds)}"))
    if len(held) > 1:
        what = f"{folder} is a folder with files of several kinds: {', '.join(held)}"
        raise DataError(Problem(what, fix="name the files in it"))
    return found


def _saved(folder: Path) -> list[Path]:
    try:
        state = json_text.loads((folder / _STATE).read_text(encoding="utf-8"))
        return [folder / each["filename"] for each in state["_data_files"]]
    except (json.JSONDecodeError, KeyError, TypeError, OSError) as error:
        what = f"{folder / _STATE} does not list the files of a data set that was saved to disk: {error}"
        raise DataError(Problem(what, fix="save it again with Dataset.save_to_disk, or name the files")) from error
