"""What ``plan`` and ``train`` have in common: read the request, and find everything wrong with it before torch is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.dialects.loaded import LoadedConfig
from posttrain.errors import ConfigError, DataError, Problem, RequestError, did_you_mean
from posttrain.placement.batch import plan_batches
from posttrain.placement.files import check_run_files
from posttrain.records.plans import BatchPlan

LATER_DIALECTS = ("verl", "verl@0.2", "roll", "skyrl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request that can be run."""

    loaded: LoadedConfig
    batches: BatchPlan
    training_prompts: int | None  # rows of the training files; None: not looked at
    validation_prompts: int | None


def split_arguments(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The configuration file, if the first argument is one, and the overrides. At least one argument."""
    first, *rest = arguments
    is_file = Path(first).is_file() or ("=" not in first and not first.startswith("~"))
    return (first, rest) if is_file else (None, [first, *rest])


def refuse_dashes(arguments: Sequence[str]) -> None:
    """Raises ConfigError for options that do not exist; most are overrides as other trainers write them."""
    problems = [
        Problem(
            f"there is no option {argument.split('=')[0]}",
            fix=f"an override has no dashes: {argument.lstrip('-')}" if "=" in argument else "--help lists the options",
        )
        for argument in arguments
        if argument.startswith("-")
    ]
    if problems:
        raise ConfigError(problems)


def read_request(arguments: Sequence[str], dialect: str | None, *, look_at_files: bool) -> Request:
    """Read the configuration and check it, the files it names and its sizes.

    Raises: RequestError with every problem: of single keys, between keys, of files and of batch sizes. Sizes are looked
        at when the keys are right: arithmetic on a value that was not understood would only confuse.
    """
    refuse_dashes(arguments)
    path, overrides = split_arguments(arguments)
    loaded = read(path, overrides, dialect)
    problems = list(loaded.problems)
    training = validation = None
    if look_at_files:
        found, training, validation = _look_at_files(loaded)
        problems += loaded.further(found)
    batches = None
    if not loaded.problems:
        batches, found = plan_batches(loaded.config, training)
        problems += loaded.locate(found)
    if batches is None or problems:
        raise RequestError(problems)
    return Request(loaded=loaded, batches=batches, training_prompts=training, validation_prompts=validation)


def read(path: str | None, overrides: Sequence[str], dialect: str | None) -> LoadedConfig:
    """The configuration in the dialect it is written in."""
    if dialect in LATER_DIALECTS:
        raise ConfigError(
            Problem(
                f"the {dialect} dialect comes with a later version",
                fix="this version reads its own configuration (native); examples/ has one to start from",
            )
        )
    if dialect not in (None, "native"):
        known = ["native", *LATER_DIALECTS]
        raise ConfigError(Problem(f"there is no dialect {dialect!r}", fix=did_you_mean(str(dialect), known)))
    from posttrain.dialects import native

    return native.read(path, overrides)


def _look_at_files(loaded: LoadedConfig) -> tuple[list[Problem], int | None, int | None]:
    """Problems of all files, and the rows of the training and validation files when they are in order."""
    from posttrain.data.readers import check_files, count_rows
    from posttrain.rewards.load import check_rewards

    data = loaded.config.data
    problems = check_files(data)
    counts: list[int | None] = [None, None]
    if not problems and not loaded.problems:
        try:
            counts = [sum(map(count_rows, files)) for files in (data.train_files, data.validation_files)]
        except DataError as error:
            problems += error.problems
    problems += [*check_rewards(loaded.config.reward), *check_run_files(loaded.config)]
    return problems, counts[0], counts[1]
