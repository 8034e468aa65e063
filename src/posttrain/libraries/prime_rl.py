"""Environments as prime-rl's files name them: the block of verifiers in each source of ``orchestrator``."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError, Problem, did_you_mean

# Where prime-rl has had its sources: the present place first, then those of 2025.
TRAINING = (("train", "source"), ("train", "env"), ("env",))
# Keys of a source that stand beside the block where the two are one table
OUTSIDE = {"name", "ratio", "sampling", "group_size", "algo", "curriculum", "serve", "num_examples", "interval"}
EVALUATION = (("eval", "source"), ("eval", "env"))


@dataclass(frozen=True, slots=True)
class PlayedEnv:
    """An environment of verifiers: an id, a file, a folder or a block, and its options."""

    env: str | Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sources:
    """The environments that training and validation play."""

    training: PlayedEnv
    validation: PlayedEnv


def sources(env: str | Mapping[str, Any], source: str | None, options: Mapping[str, Any]) -> Sources:
    """Return the environments that ``env`` names; a file of prime-rl (.toml) has them by the name of their ``source``.

    Raises: ConfigError when the file cannot be read or holds no such source, and for a block without a taskset.
    """
    if not isinstance(env, str):
        block = env.get("env", env)  # a whole source, or its block
        if not (
            isinstance(block, Mapping) and isinstance(block.get("taskset"), Mapping) and block["taskset"].get("id")
        ):
            fix = "write {taskset: {id: …}, agent: {harness: {id: …}}}"
            raise ConfigError(Problem("the block names no taskset", fix=fix, field="env.taskset.id"))
        return Sources(PlayedEnv(block, options), PlayedEnv(block, options))
    if not env.endswith(".toml"):
        return Sources(PlayedEnv(env, options), PlayedEnv(env, options))
    orchestrator = _read(env)
    training, evaluation = _named(orchestrator, TRAINING), _named(orchestrator, EVALUATION)
    if not training:
        fix = "name a file with [[orchestrator.train.source]]"
        raise ConfigError(Problem(f"{env} has no source of training", fix=fix, field="env"))
    if source is None and len(training) == 1:
        [source] = training
    if source not in training:
        what = f"{env} has no source {source!r}" if source else f"{env} has {len(training)} sources"
        fix = did_you_mean(source or "", list(training), listed=True) or f"name one of {', '.join(training)}"
        raise ConfigError(Problem(what, fix=fix, field="source"))

    def with_options(found: PlayedEnv) -> PlayedEnv:
        return PlayedEnv(found.env, {**found.options, **options})

    return Sources(with_options(training[source]), with_options(evaluation.get(source, training[source])))


def _read(path: str) -> Mapping[str, Any]:
    try:
        with Path(path).expanduser().open("rb") as file:
            whole = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            Problem(f"{path} cannot be read: {error}", fix="name a file of prime-rl", field="env")
        ) from None
    found = whole.get("orchestrator", whole)  # prime-rl's orchestrator may have a file of its own
    return found if isinstance(found, Mapping) else {}


def _named(orchestrator: Mapping[str, Any], places: tuple[tuple[str, ...], ...]) -> dict[str, PlayedEnv]:
    found: dict[str, PlayedEnv] = {}
    for place in places:
        there: Any = orchestrator
        for key in place:
            there = there.get(key) if isinstance(there, Mapping) else None
        for each in there if isinstance(there, list) else [there]:
            found.update(_source(each) if isinstance(each, Mapping) else ())
    return found


def _source(source: Mapping[str, Any]) -> Iterator[tuple[str, PlayedEnv]]:
    """Yield a source by its name: with a block, or with the id and the arguments of ``load_environment``."""
    block = source.get("env", source)
    if isinstance(block, Mapping) and isinstance(block.get("taskset"), Mapping) and block["taskset"].get("id"):
        taskset = str(block["taskset"]["id"])
        usual = f"{block['id']}+{taskset}" if isinstance(block.get("id"), str) and block["id"] else taskset
        inner = {name: value for name, value in block.items() if name not in OUTSIDE} if block is source else block
        yield str(source.get("name") or usual), PlayedEnv(inner)
    elif isinstance(source.get("id"), str):
        arguments = source.get("args")
        yield (
            str(source.get("name") or source["id"]),
            PlayedEnv(source["id"], arguments if isinstance(arguments, Mapping) else {}),
        )
