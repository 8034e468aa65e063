"""Reading of a command's request, and all its checks, before torch is loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from posttrain.cli.data_sources import data_source_problems
from posttrain.cli.hub import with_hub_data
from posttrain.config import RunConfig
from posttrain.config.roles import draws_no_prompts, reads_references
from posttrain.dialects.detect import counts_devices, has_no_effect, is_shipped, read_config, takes_empty, takes_text
from posttrain.dialects.entries import TRAIN, Entry
from posttrain.dialects.loaded import LoadedConfig
from posttrain.dialects.scripts.asks import Ask, asked
from posttrain.dialects.scripts.names import is_script
from posttrain.errors import ConfigError, DataError, Problem, RequestError
from posttrain.plan.batch import plan_batches
from posttrain.plan.checks.environments import check_environments
from posttrain.plan.checks.images import SHOWN, image_problems, shows_pictures
from posttrain.plan.checks.own_classes import check_callback, check_own_classes, check_own_files
from posttrain.plan.files import check_chat_template, check_reads_images, check_run_files, check_sees_alike
from posttrain.plan.heads import head_problems
from posttrain.plan.placement import PlacementPlan
from posttrain.plan.positions import check_positions, positions_warnings
from posttrain.plan.roles import place
from posttrain.plan.teacher_files import check_teachers
from posttrain.records.batch_plans import BatchPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """A checked training request."""

    loaded: LoadedConfig[RunConfig]
    batches: BatchPlan
    placement: PlacementPlan
    training_prompts: int | None  # rows of the training files; None: not counted
    validation_prompts: int | None
    images: str = ""  # count and sizes of the images in the first prompts; "" without images


def split_arguments(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split the arguments. Returns: the configuration file, if the first argument is one, and the overrides.

    Raises: ConfigError for a first override with a blank before its =.
    """
    if not arguments:
        return None, []
    first, *rest = arguments
    if rest and rest[0].startswith("="):
        value = rest[0][1:] or (rest[1] if rest[1:] else "VALUE")
        raise ConfigError(Problem(f"there is a blank before the = of {first}", fix=f"write {first}={value}"))
    is_file = Path(first).is_file() or ("=" not in first and not first.startswith("~"))
    return (first, rest) if is_file else (None, [first, *rest])


# How Hydra's programs, and ROLL's own, name their file.
CONFIG_PATH = ("--config-path", "-cp", "--config_path")
CONFIG_NAME = ("--config-name", "-cn", "--config_name")


def named_by_hydra(arguments: Sequence[str]) -> list[str]:
    """The same arguments with ``--config-path FOLDER --config-name NAME`` as the file that they name, at the first place.

    A name without a folder of the user's, such as verl's ``--config-path=config --config-name=ppo_megatron_trainer``, stays
    a name: it means the file that the peer ships.

    Raises: ConfigError for a folder without a name, for an option without a value, and when there is a file besides.
    """
    rest, named = [], {}
    words = iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        kind = "folder" if option in CONFIG_PATH else "name" if option in CONFIG_NAME else ""
        if not kind:
            rest.append(word)
            continue
        value = value if equals else next(words, "")
        if not value:
            raise ConfigError(Problem(f"{option} has no value", fix=f"write {option}=VALUE, or the file alone"))
        named[kind] = value
    if not named:
        return rest
    if "name" not in named:
        folder = named["folder"]
        raise ConfigError(
            Problem("--config-path names a folder, and no file is named", fix=f"write {folder}/FILE.yaml")
        )
    if split_arguments(rest)[0] is not None:
        raise ConfigError(Problem(f"two files are named: {rest[0]} and --config-name={named['name']}", fix="keep one"))
    name = named["name"] if named["name"].endswith((".yaml", ".yml")) else f"{named['name']}.yaml"
    file = Path(named.get("folder", ".")) / name
    return [str(file) if file.expanduser().is_file() or not is_shipped(name) else name, *rest]


def refuse_dashes(arguments: Sequence[str], meant: Callable[[str], str] = str) -> None:
    """Raises: ConfigError for unknown options; most are overrides in the form of other trainers.

    Args: ``meant`` gives the key that such a name means.
    """
    problems = []
    for argument, following in pairwise([*arguments, "-"]):
        if not argument.startswith("-"):
            continue
        name, equals, value = argument.partition("=")
        value = value if equals else "" if following.startswith("-") or "=" in following else following
        override = f"an override has no dashes: {meant(name.lstrip('-'))}={value}"
        fix = f"{override}; --help lists the options" if value else "--help lists the options"
        problems.append(Problem(f"there is no option {name}", fix=fix))
    if problems:
        raise ConfigError(problems)


def _key_meant(arguments: Sequence[str], dialect: str | None, name: str) -> str:
    """The key that the name of an unknown option means in the configuration that the other arguments describe."""
    first = next((argument for argument in arguments if not argument.startswith("-")), None)
    path = first if first is not None and Path(first).is_file() else None
    name = name.replace("-", "_")
    try:
        problems = read_config(path, [f"{name}=1"], dialect).problems
    except RequestError as error:
        problems = tuple(error.problems)
    fixes = [problem.fix for problem in problems if problem.where == f"override {name}=1"]
    found = re.search(r"did you mean ([\w.]+)\?", " ".join(fixes))
    return found[1] if found else name


def take_settings(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Take ``--set NAME=VALUE`` out of the arguments. Returns: the others, and the values.

    Raises: ConfigError for a setting that is no NAME=VALUE.
    """
    rest: list[str] = []
    given: dict[str, str] = {}
    words = iter(arguments)
    for word in words:
        if word != "--set" and not word.startswith("--set="):
            rest.append(word)
            continue
        name, equals, value = (next(words, "") if word == "--set" else word.removeprefix("--set=")).partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*|[1-9]\d?", name):
            what = f"--set {name} is no NAME=VALUE of a variable, or NUMBER=VALUE of an argument"
            raise ConfigError(
                Problem(what, fix="write --set MODEL_PATH=/models/mine, or --set 1=8 for the script's $1")
            )
        given[name] = value
    return rest, given


MACHINE_DEVICES = 8  # of a machine that a plan takes where a script counts those of its own


def _none(dialect: str, key: str) -> bool:
    return False


def load_request(
    arguments: Sequence[str],
    dialect: str | None,
    entry: Entry[Any] | None = None,
    *,
    or_entry: Entry[Any] | None = None,
    here: bool = False,
    drop_unknown: bool = False,
    skip_files: bool = False,
) -> LoadedConfig[Any]:
    """Load the configuration that a command's arguments describe; ``entry`` is the expected entry, None for any.

    A launch script stands for the trainer's command inside it; what follows the script are its own arguments.

    Args: ``or_entry`` is another that the command takes; ``here`` moves a cluster configuration to one device;
        ``drop_unknown`` leaves out keys of the user's own; ``skip_files`` opens no file that the configuration names.

    Raises: RequestError for unknown options and for files that cannot be read.
    """
    notes: tuple[str, ...] = ()
    asks: tuple[Ask, ...] = ()
    lost: tuple[Problem, ...] = ()
    arguments, given = take_settings(arguments)
    if given and not (arguments and is_script(arguments[0])):
        what = "--set gives variables of a launch script, and there is none"
        raise ConfigError(
            Problem(what, fix="write the key: KEY=VALUE; or name the script first: run.sh --set NAME=VALUE")
        )
    if arguments and is_script(arguments[0]):
        from posttrain.dialects.scripts.launch import read_script

        launch = read_script(
            arguments[0],
            arguments[1:],
            given=given,
            entry=entry.name if entry is not None else "",
            passes_guards=skip_files,
            leaves_out=partial(has_no_effect, drop_unknown=drop_unknown),
            takes_names=takes_text if skip_files else _none,
            counts_devices=counts_devices if here or skip_files else _none,
            devices=1 if here else MACHINE_DEVICES,
            takes_empty=partial(takes_empty, drop_unknown=drop_unknown) if skip_files else _none,
        )
        arguments, notes, dialect = launch.arguments, launch.notes, dialect or launch.dialect
        asks, lost = launch.asks, launch.lost
    arguments = named_by_hydra(arguments)
    refuse_dashes(arguments, partial(_key_meant, arguments, dialect))
    if not arguments and dialect is None:
        raise ConfigError(Problem("there is nothing to read", fix="name a file, or a --dialect and its keys"))
    path, overrides = split_arguments(arguments)
    loaded = read_config(
        path,
        overrides,
        dialect,
        entry=entry,
        or_entry=or_entry,
        here=here,
        drop_unknown=drop_unknown,
        skip_files=skip_files,
    )
    open_questions, confirmed = asked(asks, loaded.words.value) if loaded.words is not None else ([], [])
    if lost:
        problems = (*lost, *loaded.problems) if loaded.problems else ()
        loaded = replace(loaded, problems=problems, slips=(*lost, *loaded.slips))
    if open_questions:
        loaded = replace(loaded, unsupported=(*loaded.unsupported, *open_questions))
    notes = (*notes, *confirmed)
    return loaded.warned(notes) if notes else loaded


def read_request(
    arguments: Sequence[str],
    dialect: str | None,
    *,
    look_at_files: bool,
    here: bool = False,
    drop_unknown: bool = False,
    to_run: bool = False,
) -> TrainRequest:
    """Read and check a training request: the configuration, the files it names and its sizes. See ``check_request``.

    Args: ``here`` and ``drop_unknown`` as in ``load_request``.
    """
    loaded = load_request(arguments, dialect, TRAIN, here=here, drop_unknown=drop_unknown)
    if to_run:
        loaded = with_hub_data(loaded)
    return check_request(loaded, look_at_files=look_at_files, to_run=to_run)


def check_request(loaded: LoadedConfig[RunConfig], *, look_at_files: bool, to_run: bool = False) -> TrainRequest:
    """Check a training configuration, the files it names and its sizes.

    Args: ``to_run`` also rejects what is planned but not built yet; a plan only reports it.
    Raises: RequestError with all problems: of single keys, between keys, of files and of batch sizes. Sizes are checked only
        when all keys are valid, to avoid follow-up errors.
    """
    problems = [*loaded.problems, *(loaded.unsupported if to_run else ())]
    training = validation = None
    images = ""
    if look_at_files:
        found, training, validation = _look_at_files(loaded)
        if not found and not loaded.problems and loaded.config.data.dataset_class_file is None:
            found, images = _look_at_images(loaded.config)
        problems += [problem for problem in loaded.further(found) if not _follows(problem, loaded)]
        loaded = loaded.warned(positions_warnings(loaded.config))
    batches = None
    placement: PlacementPlan | None = None
    if not loaded.problems:
        placement, misplaced = place(loaded.config)
        batches, found = plan_batches(loaded.config, training) if not misplaced else (None, [])
        if look_at_files and placement is not None:
            found += head_problems(loaded.config, placement)
        problems += loaded.locate([*misplaced, *found])
    if batches is None or placement is None or problems:
        raise RequestError(problems)
    return TrainRequest(
        loaded=loaded,
        batches=batches,
        placement=placement,
        training_prompts=training,
        validation_prompts=validation,
        images=images,
    )


def _follows(problem: Problem, loaded: LoadedConfig[RunConfig]) -> bool:
    """True for a critic that is only there because the default stands in for an estimator that is not known."""
    estimator, critic = loaded.key("advantage.name"), loaded.key("critic.path")
    misnamed = any(each.field == estimator for each in loaded.problems)
    return misnamed and (problem.field == "critic.path" or critic in problem.where) and "(a default;" in problem.where


def _look_at_files(loaded: LoadedConfig[RunConfig]) -> tuple[list[Problem], int | None, int | None]:
    """Check all files. Returns: problems, and the rows of the training and validation files when they are valid."""
    from posttrain.data.check import check_rows
    from posttrain.data.readers import check_files

    data = loaded.config.data
    generated = loaded.config.environment
    own, none = data.dataset_class_file is not None, draws_no_prompts(loaded.config)
    needed, references = generated.train_episodes is None and not none, reads_references(loaded.config)
    problems = check_own_files(data) if own else check_files(data, needed=needed, references=references)
    problems += check_own_classes(loaded.config)
    counts: list[int | None] = [None, None]
    if not problems and not loaded.problems and not own:
        try:
            for index, (files, episodes) in enumerate(
                (
                    (data.train_files, generated.train_episodes),
                    (data.validation_files, generated.validation_episodes),
                )
            ):
                checked = [check_rows(file, data, references=references) for file in files]
                counts[index] = episodes or sum(rows for rows, _ in checked)
                problems += [problem for _, found in checked for problem in found]
            problems += data_source_problems(loaded.config)
        except DataError as error:
            problems += error.problems
    problems += other_file_problems(loaded.config)
    training, validation = None if none else counts[0], counts[1]
    if training is not None and data.max_prompts is not None:
        training = min(training, data.max_prompts)
    return problems, training, validation


def other_file_problems(config: RunConfig) -> list[Problem]:
    """Check the files besides the data, which may not be here yet."""
    from posttrain.rewards.load import check_rewards

    data = config.data
    templated = bool(data.train_files) and data.templated_prompts != "raw" and data.dataset_class_file is None
    return [
        *check_rewards(config.reward),
        *check_run_files(config),
        *check_callback(config),
        *check_teachers(config),
        *(check_chat_template(config.model) if templated else ()),
        *check_environments(config),
        *check_positions(config),
        *_check_pictures(config),
    ]


def _check_pictures(config: RunConfig) -> list[Problem]:
    """Check that the model reads the images of environments that show some."""
    if not shows_pictures(config):
        return []
    from posttrain.data.images import VISION_MODELS
    from posttrain.data.turn_images import TEXTS_INSTEAD

    return check_reads_images(config.model, VISION_MODELS, TEXTS_INSTEAD, SHOWN)


def _look_at_images(config: RunConfig) -> tuple[list[Problem], str]:
    """Check the images of the first prompts. Returns: problems, and a line that describes the images."""
    from posttrain.data.check import first_images
    from posttrain.data.images import CHOOSE_A_VISION_MODEL, VISION_MODELS
    from posttrain.data.readers import MAX_LISTED

    try:
        files = [*config.data.train_files, *config.data.validation_files]
        found = first_images(files, config.data, references=reads_references(config))
    except DataError as error:
        return error.problems, ""
    if not found.image_sizes:
        return [], ""  # rows of text are read and reported when the dataset is opened
    problems = found.problems[:MAX_LISTED]
    problems += check_reads_images(config.model, VISION_MODELS, CHOOSE_A_VISION_MODEL)
    problems += [*image_problems(config), *check_sees_alike(config)]
    return problems, f"in the first {found.rows} prompts: {found.images_text()}"
