"""The user's own Python files of a run: kept in its folder, and compared when it resumes."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from posttrain.config import RunConfig, TrainingConfig
from posttrain.errors import ConfigError
from posttrain.libraries.disk_errors import naming
from posttrain.run.config_change import Change
from posttrain.user_files import source_file

FOLDER = "code"


def own_files(config: TrainingConfig) -> dict[str, dict[str, str]]:
    """Field -> {path, sha256, copy} of each file with an estimator, a loss, a reward, a dataset or a sampler; as in run.json. A
    file that is not there is left out: using it reports that."""
    found = {}
    for field, path in _paths(config):
        with suppress(ConfigError):
            file = source_file(path)
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            found[field] = {"path": path, "sha256": digest, "copy": f"{FOLDER}/{file.stem}.{digest[:12]}.py"}
    return found


def keep(files: Mapping[str, Mapping[str, str]], folder: Path) -> None:
    """Copy them into the run folder. Earlier contents stay there, under other names."""
    for about in files.values():
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
    return f"{Path(about['path']).name} ({about['copy']})"


def _paths(config: TrainingConfig) -> Iterator[tuple[str, str]]:
    if isinstance(config, RunConfig):
        named = {"advantage.path": config.advantage.path, "loss.path": config.loss.path}
        named["data.dataset_class_file"] = config.data.dataset_class_file
        named["data.sampler_class_file"] = config.data.sampler_class_file
        named |= {f"reward.terms.{index}.path": term.path for index, term in enumerate(config.reward.terms)}
        yield from ((field, path) for field, path in named.items() if path is not None)
