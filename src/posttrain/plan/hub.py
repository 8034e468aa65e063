"""Models and data sets of the hub in a configuration: replaced by their files in the hub's cache, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from posttrain.config.base import Section
from posttrain.errors import Problem
from posttrain.libraries.hub_names import HubName, data_name, model_name, portable
from posttrain.libraries.row_slices import RowSlice
from posttrain.plan.files import hub_models

C = TypeVar("C", bound=Section)
DATA = ("train_files", "validation_files", "files")
# Settings with one value for each file, in order
BESIDE = {"train_files": "train_sources", "validation_files": "validation_sources"}


def hub_data(config: Any) -> dict[str, list[HubName]]:
    """The data sets of the hub that a configuration names: by field, such as data.train_files."""
    if not hasattr(config, "data"):
        return {}
    found = {f"data.{name}": [*filter(None, map(data_name, getattr(config.data, name, [])))] for name in DATA}
    return {field: names for field, names in found.items() if names}


def local_data_problems(config: Any) -> list[Problem]:
    """Check that the data files beside data sets of the hub exist."""
    from posttrain.data.record_files import first_record

    found: list[Problem] = []
    for name in DATA:
        for path in getattr(config.data, name, []):
            found += first_record(path, f"data.{name}", read=False)[1] if data_name(path) is None else []
    return found


def replace_data(config: C, files: Callable[[HubName, str], Sequence[str]]) -> C:
    """Put files in the place of data sets of the hub; ``files`` gives those of a name that a field holds."""
    section: Any = getattr(config, "data", None)
    for field in hub_data(config):
        name = field.removeprefix("data.")
        beside = BESIDE.get(name, "")
        given: Sequence[str] = getattr(section, beside, [])
        listed: list[str] = []
        sources: list[str] = []
        for index, path in enumerate(getattr(section, name)):
            wanted = data_name(path)
            found: Sequence[str] = [path] if wanted is None else _of_the_rows(files(wanted, field), wanted.rows)
            listed += found
            sources += [*given[index : index + 1]] * len(found)
        section = section.model_copy(update={name: listed} | ({beside: sources} if given else {}))
    return config.model_copy(update={"data": section}) if section is not None else config


def _of_the_rows(files: Sequence[str], rows: RowSlice | None) -> list[str]:
    """Write behind each file which of its rows a slice of all files together means; files without one are left out."""
    if rows is None:
        return list(files)
    from posttrain.data.record_files import count_rows

    counts = [count_rows(file) for file in files]
    wanted = rows.of(sum(counts))
    found, start = [], 0
    for file, count in zip(files, counts, strict=True):
        first, last = max(wanted.start - start, 0), min(wanted.stop - start, count)
        if first < last:
            found.append(file if (first, last) == (0, count) else f"{file}{RowSlice(first, last)}")
        start += count
    return found or [f"{file}{RowSlice(0, 0)}" for file in files[:1]]


def replace_models(config: Any, folder: Callable[[HubName, str], str]) -> Any:
    """Put folders in the place of the models of the hub that a command loads; ``folder`` gives that of a name and its field.

    model.revision holds for every field with the id of model.path, unless its id has a revision.
    """
    revision = config.model.revision or ""
    ours = model_name(config.model.path)
    found: dict[str, str] = {}
    for field, text in hub_models(config).items():
        wanted = model_name(text)
        assert wanted is not None
        if revision and ours is not None and wanted.name == ours.name and not wanted.revision:
            wanted = replace(wanted, revision=revision)
        found[field] = folder(wanted, field)
    for field, path in found.items():
        config = _with(config, field.split("."), path)
    if "model.path" in found:
        reference = getattr(config, "reference", None)
        if reference is not None and reference.path == (ours and ours.name):
            # Not loaded, and still the policy's
            config = _with(config, ["reference", "path"], found["model.path"])
        config = _with(config, ["model", "revision"], None)
    return config


def portable_config(config: C) -> C:
    """The configuration with the hub's names in the place of paths in its cache: as a run saves and compares it, wherever the
    cache is. run.hub_commits says which commits they mean."""
    commits: Mapping[str, str] = getattr(getattr(config, "run", None), "hub_commits", {})
    return _portable(config, commits) if commits else config


def _portable(value: Any, commits: Mapping[str, str]) -> Any:
    match value:
        case Section():
            fields = type(value).model_fields
            return value.model_copy(update={name: _portable(getattr(value, name), commits) for name in fields})
        case list():
            return [_portable(each, commits) for each in value]
        case dict():
            return {key: _portable(each, commits) for key, each in value.items()}
        case str():
            return portable(value, commits)
        case _:
            return value


def _with(value: Any, path: Sequence[str], new: Any) -> Any:
    """A copy of a section or mapping with the value at a path replaced."""
    name, *rest = path
    if isinstance(value, Mapping):
        return {**value, name: _with(value[name], rest, new) if rest else new}
    return value.model_copy(update={name: _with(getattr(value, name), rest, new) if rest else new})
