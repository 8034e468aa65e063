"""Checks of environments that look at files and libraries: what a run would otherwise find out with its first episode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from posttrain.config import RunConfig
from posttrain.config.checks.environment import setting_problems_of
from posttrain.config.environment import OPEN, EnvironmentConfig
from posttrain.data.episodes import validation_episodes
from posttrain.errors import ConfigError, DataError, Problem, RequestError, did_you_mean
from posttrain.plan.checks.environment_code import code_problems
from posttrain.plan.environments.skyrl_gym import env_class_problems
from posttrain.plan.own_code import find, method_problems, own_code_problems
from posttrain.registry import ENV_CHECKS, ENVS

METHODS = ("reset", "step", "close")
SCORES = ("score",)  # in place of them, of one that scores conversations of programs outside
SKYRL_COLUMN = "env_class"
MOST_SHOWN = 5


def check_environments(config: RunConfig) -> list[Problem]:
    """Return what is wrong with the environments of a run, and with the rows that choose among them. No environment of the user's
    is imported in this process, no server started. Raises nothing."""
    environment = config.environment
    if not environment.used:
        return []
    problems: list[Problem] = []
    for field, name, settings in _chosen(environment):
        problems += _problems(name, settings, field, scores=environment.name == OPEN)
    if not problems:
        for _, name, settings in _chosen(environment):
            problems += code_problems(name, settings, environment.environment_variables)
    if not problems:
        problems += _row_problems(config)
    if not problems and environment.name == OPEN:
        problems += _validation_problems(config)
    return problems


def _chosen(environment: EnvironmentConfig) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield the field, the name and the settings of every environment of a run."""
    if environment.name is not None:
        yield "environment", environment.name, environment.settings
    for tag, each in environment.named.items():
        yield f"environment.named.{tag}", each.name, each.settings


def _validation_problems(config: RunConfig) -> Iterator[Problem]:
    """Report the environments of an open run that its validation needs and that can only score."""
    environment = config.environment
    asked: set[Any] = set()
    if environment.validation_episodes is not None:
        asked = {prompt.extra_info.get(environment.column) for prompt in validation_episodes(environment)}
    for file in config.data.validation_files:
        # loads numpy and pyarrow, for files alone
        from posttrain.data.column_values import column_values

        with suppress(DataError):  # reported where the files are checked
            asked |= column_values(file, environment.column, config.data)
    others = environment.settings.get("scored_by")
    if None in asked and others is None:
        what = f"validation has rows that name no environment in column {environment.column} to play them"
        yield Problem(what, fix="name one for them with environment.settings.scored_by", field="environment.named")
    for tag in sorted({str(others if each is None else each) for each in asked} & {*environment.named}):
        if ":" not in (name := environment.named[tag].name):
            continue
        field = f"environment.named.{tag}.name"
        for problem in method_problems(find(name, holds="your environment"), METHODS, field=field):
            yield replace(problem, what=f"{problem.what}, so it can score conversations but not play the validation")


def _problems(name: str, settings: Mapping[str, Any], field: str, *, scores: bool) -> Iterator[Problem]:
    if ":" in name:
        yield from _own_problems(name, settings, field, scores=scores)
    elif not ENVS.is_built_in(name) or list(setting_problems_of(name, settings, "")):
        return  # a plug-in's, of which only the settings are known; an unknown name or setting, which is reported already
    elif name in ENV_CHECKS.names():
        yield from ENV_CHECKS.get(name)(settings, f"{field}.settings")
    elif not ENVS.facts(name).loads:
        yield from _built_problems(name, settings, field)


def _own_problems(name: str, settings: Mapping[str, Any], field: str, *, scores: bool) -> Iterator[Problem]:
    at, holds = f"{field}.name", "your environment"
    problems = list(own_code_problems(name, settings, field=at, settings=f"{field}.settings", holds=holds))
    with suppress(ConfigError):  # among the problems
        own = find(name, holds=holds)
        lacks = list(method_problems(own, METHODS, field=at))
        if lacks and scores and (cannot := list(method_problems(own, SCORES, field=at))):
            what = f"{own.where} cannot score a conversation: it has no method 'score', and not all of {', '.join(METHODS)}"
            problems.append(Problem(what, fix=cannot[0].fix, field=at))
        elif not scores:
            problems += lacks
    yield from problems


def _built_problems(name: str, settings: Mapping[str, Any], field: str) -> Iterator[Problem]:
    """Build an environment that needs no row and starts nothing."""
    from posttrain.interfaces.env import EnvSpec

    try:
        ENVS.get(name)(EnvSpec(name=name, settings=settings), **settings)
    except RequestError as error:
        for problem in error.problems:
            yield replace(problem, field=".".join(filter(None, (field, "settings", problem.field))))
    except Exception as error:  # noqa: BLE001 - of a library, or of a value of another kind than it takes
        what = f"the environment {name} cannot be made with these settings: {type(error).__name__}: {error}"
        yield Problem(what, field=f"{field}.settings")


def _row_problems(config: RunConfig) -> Iterator[Problem]:
    """Report the rows that name an environment which is not there."""
    from posttrain.data.column_values import column_values  # loads numpy and pyarrow, for files alone

    environment = config.environment
    for files in (config.data.train_files, config.data.validation_files):
        for file in files:
            try:
                if environment.named:
                    yield from _named_problems(environment, column_values(file, environment.column, config.data), file)
                if environment.name == "skyrl_gym":
                    asked = column_values(file, SKYRL_COLUMN, config.data)
                    for name in sorted(str(each) for each in asked if each)[:MOST_SHOWN]:
                        for problem in env_class_problems(name, environment.settings, "environment.settings.env_class"):
                            yield replace(problem, what=f"{problem.what}, asked for in {file}")
            except DataError:  # reported where the files are checked
                return


def _named_problems(environment: EnvironmentConfig, asked: set[Any], file: str) -> Iterator[Problem]:
    known = list(environment.named)
    if None in asked and environment.name is None:
        what = f"{file} has rows that name no environment in column {environment.column}"
        yield Problem(what, fix="name one for them with environment.name", field="environment.column")
    unknown = sorted({str(each) for each in asked if each is not None} - {*known})
    for name in unknown[:MOST_SHOWN]:
        what = f"{file} has rows for the environment {name!r}, which is not there (named: {', '.join(known)})"
        fix = did_you_mean(name, known, listed=True) or "add it to environment.named"
        yield Problem(what, fix=fix, field="environment.named")
