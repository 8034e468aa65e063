"""Checks of the user's own dataset, sampler and callback classes, from their source: nothing is run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from posttrain.config import RunConfig, TrainingConfig
from posttrain.config.data import DataConfig
from posttrain.errors import ConfigError, Problem
from posttrain.plan.own_code import find, method_problems, needed_arguments
from posttrain.user_files import PACKAGE, source_file

# The keyword arguments that a class is offered; it gets those that it takes.
OFFERED = {
    "dataset": ("data_files", "parquet_files", "tokenizer", "processor", "config", "max_samples", "what"),
    "sampler": ("data_source", "data_config"),
}


def check_own_classes(config: RunConfig) -> list[Problem]:
    """Check the file, the name and the constructor of each class."""
    return [problem for kind in OFFERED for problem in _class_problems(config.data, kind)]


def check_callback(config: TrainingConfig) -> list[Problem]:
    """Check the file, the name, the constructor and the method of checkpoint.callback."""
    where, field = config.checkpoint.callback, "checkpoint.callback"
    if where is None:
        return []
    try:
        own = find(where, holds="your callback")
    except ConfigError as error:
        return [replace(problem, field=field) for problem in error.problems]
    if own.definition is not None and not own.is_class:
        return [Problem(f"{where} is a function, and a callback is a class with on_save", field=field)]
    problems = list(method_problems(own, ("on_save",), field=field))
    if lacking := [each for each in needed_arguments(own) if each != "config"]:
        what = f"{where} needs {', '.join(lacking)}, and is constructed with config"
        problems.append(Problem(what, fix="give it a default", field=field))
    return problems


def check_own_files(data: DataConfig) -> list[Problem]:
    """Check that the files of a dataset class exist; what stands in them is read by the class."""
    from posttrain.data.record_files import first_record

    fields = ("train_files", "validation_files")
    return [
        problem
        for field in fields
        for path in getattr(data, field)
        for problem in first_record(path, f"data.{field}", read=False)[1]
    ]


def _class_problems(data: DataConfig, kind: str) -> Iterator[Problem]:
    file, name = getattr(data, f"{kind}_class_file"), getattr(data, f"{kind}_class_name")
    if file is None or name is None:
        return
    field = f"data.{kind}_class_name"
    try:
        source_file(file, holds=f"your {kind} class")
        own = find(f"{file.removeprefix(PACKAGE)}:{name}", holds=f"your {kind} class")
    except ConfigError as error:
        for problem in error.problems:
            at = f"data.{kind}_class_file" if problem.field == "path" else field
            yield Problem(problem.what, fix=problem.fix, field=at)
        return
    if own.definition is not None and not own.is_class:
        yield Problem(f"{name} in {file} is a function, and a {kind} is a class", field=field)
        return
    lacking = [each for each in needed_arguments(own) if each not in OFFERED[kind]]
    if lacking:
        what = f"{name} in {file} needs {', '.join(lacking)}, and is constructed with {', '.join(OFFERED[kind])}"
        yield Problem(what, fix="give it a default", field=field)
