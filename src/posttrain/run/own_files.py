"""The user's own files of a run, compared when it resumes: Python files, which are kept in its folder, too, and training data."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from posttrain.config import RunConfig, TrainingConfig
from posttrain.data.folders import files_of_folder
from posttrain.data.record_files import KINDS, file_and_slice
from posttrain.errors import ConfigError, DataError
from posttrain.libraries.disk_errors import naming
from posttrain.run.config_change import Change
from posttrain.user_files import source_file

FOLDER = "code"


def own_files(config: TrainingConfig) -> dict[str, dict[str, str]]:
    """Field -> {path, sha256, copy} of each file with an estimator, a loss, a reward, a dataset or a sampler, and
    {path, sha256} of each file or folder of training data; as in run.json. One that is not there is left out: using it
    reports that."""
    found = {}
    for field, path in _paths(config):
        with suppress(ConfigError):
            file = source_file(path)
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            found[field] = {"path": path, "sha256": digest, "copy": f"{FOLDER}/{file.stem}.{digest[:12]}.py"}
    for index, path in enumerate(config.data.train_files):
        file, _ = file_and_slice(path)
        with suppress(OSError, DataError):
            if file.is_file():
                found[f"data.train_files.{index}"] = {"path": path, "sha256": _digest(file)}
            elif file.is_dir():
                held = [f"{_digest(each)} {each.relative_to(file)}\n" for each in files_of_folder(file, KINDS)]
                digest = hashlib.sha256("".join(held).encode()).hexdigest()
                found[f"data.train_files.{index}"] = {"path": path, "sha256": digest}
            # else a data set of the hub, or a pipe, which can be read once
    return found


def _digest(file: Path) -> str:
    about = file.stat()
    return _digest_of(file, about.st_size, about.st_mtime_ns)


@cache
def _digest_of(file: Path, size: int, changed_ns: int) -> str:
    """SHA-256 of a file, read once in a process while its size and its time of change stay the same."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def keep(files: Mapping[str, Mapping[str, str]], folder: Path) -> None:
    """Copy the Python files into the run folder. Earlier contents stay there, under other names."""
    for about in (each for each in files.values() if "copy" in each):
        copy = folder / about["copy"]
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            with naming(copy):
                shutil.copyfile(source_file(about["path"]), copy)


def changed_files(saved: Mapping[str, Any], now: Mapping[str, Mapping[str, str]]) -> list[Change]:
    """The files of the same path that have another content than in the steps until now."""
    return [
        Change(field, _named(saved[field]), _named(about))
        for field, about in now.items()
        if field in saved and saved[field]["path"] == about["path"] and saved[field]["sha256"] != about["sha256"]
    ]


def _named(about: Mapping[str, str]) -> str:
    return f"{Path(about['path']).name} ({about.get('copy') or 'sha256 ' + about['sha256'][:12]})"


def _paths(config: TrainingConfig) -> Iterator[tuple[str, str]]:
    if isinstance(config, RunConfig):
        named = {"advantage.path": config.advantage.path, "loss.path": config.loss.path}
        named["data.dataset_class_file"] = config.data.dataset_class_file
        named["data.sampler_class_file"] = config.data.sampler_class_file
        named |= {f"reward.terms.{index}.path": term.path for index, term in enumerate(config.reward.terms)}
        yield from ((field, path) for field, path in named.items() if path is not None)
