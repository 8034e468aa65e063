"""The parts of a fork that its loop needs: the class that plays, the reward function, the tokenizer, a trainer's attributes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from types import MethodType
from typing import Any

from omegaconf import OmegaConf

from posttrain.errors import ConfigError, Problem, RequestError
from posttrain.libraries.verl.parts import Checkout, NotBound, Values
from posttrain.models.lists import tokenizer_of
from posttrain.user_files import loading_problem
from posttrain.verl_episodes import (
    PROGRAMS,
    SYNCHRONOUS,
    EpisodeLoop,
    EpisodeReward,
    NotPlayable,
    find_loop,
    find_reward,
)
from posttrain.verl_sites import Site, reached


@lru_cache(maxsize=1)
def opened(trainer: str, folder: str, program: str | None) -> tuple[Checkout, EpisodeLoop, EpisodeReward | None]:
    """Find the class that plays and the reward function; nothing is run. Raises: ConfigError."""
    root = Path(folder).expanduser().resolve()
    file, _, method = trainer.rpartition(":")
    owner, _, fit = method.partition(".")
    builds = Path(program).expanduser().resolve() if program else None
    try:
        loop = find_loop(Path(file).expanduser().resolve(), owner, fit, [root], builds)
    except NotPlayable as error:
        raise ConfigError(Problem(f"{trainer}: {error}", field="trainer")) from None
    return Checkout(root), loop, find_reward(builds, [root]) if builds else None


class TrainerParts:
    """The attributes of verl's trainer that the expressions of its loop read.

    Args: workers, in the place of verl's sampling workers; config, the values that the expressions read; step, of the run.
    Raises: ConfigError, or whatever the fork's code raises.
    """

    def __init__(self, checkout: Checkout, loop: EpisodeLoop, tokenizer: Any, workers: Any, config: Any, step: int = 0):
        self.tokenizer, self.actor_rollout_wg, self.config = tokenizer, workers, config
        for name, value in SYNCHRONOUS.items():
            setattr(self, name, value)
        if loop.counter:
            setattr(self, loop.counter, step)
        for definition in loop.methods:
            function = Values(checkout, loop.site, {}).function(definition)
            setattr(self, definition.name, MethodType(function, self))
        for name, each in loop.attributes.items():
            values = Values(checkout, each.site, {"config": config, "tokenizer": tokenizer})
            setattr(self, name, values.evaluated(each.value))


class _NoWorkers:
    """Sampling workers that answer nothing."""

    world_size = 1


def load(settings: Mapping[str, Any]) -> None:
    """Load the class that plays and the reward function; where the tokenizer is on this machine, make both, too.

    Raises: ConfigError for what cannot be imported or made.
    """
    checkout, loop, reward = opened(settings["trainer"], settings["folder"], settings.get("program"))
    _load_names(checkout, loop.site, [loop.made, loop.call], known=("self", loop.batch, loop.rows))
    for attribute in loop.attributes.values():
        _load_names(checkout, attribute.site, [attribute.value], known=PROGRAMS)
    if reward is not None:
        _load_names(checkout, reward.site, [reward.value], known=PROGRAMS)
    try:
        tokenizer = tokenizer_of(tuple(settings["model"].items()))
    except RequestError:
        return  # reported with the model, which the hub may have
    config = OmegaConf.create(dict(settings.get("config") or {}))
    with _named(checkout, loop.name):
        trainer = TrainerParts(checkout, loop, tokenizer, _NoWorkers(), config)
        Values(checkout, loop.site, {"self": trainer}).evaluated(loop.made)
    if reward is not None:
        with _named(checkout, reward.name):
            Values(checkout, reward.site, {"config": config, "tokenizer": tokenizer}).evaluated(reward.value)


@contextmanager
def _named(checkout: Checkout, name: str) -> Iterator[None]:
    """Name the fork's line where its code raises. A server that does not answer yet is no error: the run starts later."""
    try:
        yield
    except RequestError:
        raise
    except OSError as error:
        if error.filename is not None:
            raise ConfigError(loading_problem(error, checkout.folder, name)) from None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the fork's own code
        raise ConfigError(loading_problem(error, checkout.folder, name)) from None


def _load_names(checkout: Checkout, site: Site, values: list[ast.expr], *, known: Sequence[str]) -> None:
    """Load what expressions read from the top of their file; ``known`` names have their values."""
    names = {node.id for node in reached(values, site.names, known) if isinstance(node, ast.Name)}
    for name in sorted(names - {*site.names.given, *known}):
        with suppress(NotBound):
            checkout.name(site.file, name)
