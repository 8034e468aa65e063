"""The parts of a fork that its loop needs: the class that plays, the reward function, the tokenizer, a trainer's attributes."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from posttrain.config.model import ModelConfig
from posttrain.envs.verl_loop.parts import Checkout, NotBound, Values
from posttrain.errors import ConfigError, Problem, RequestError
from posttrain.models.loading import load_tokenizer
from posttrain.user_files import loading_problem
from posttrain.verl_episodes import EpisodeLoop, EpisodeReward, NotPlayable, Site, find_loop, find_reward


@lru_cache(maxsize=1)
def opened(trainer: str, folder: str, program: str | None) -> tuple[Checkout, EpisodeLoop, EpisodeReward | None]:
    """Find the class that plays and the reward function; nothing is run. Raises: ConfigError."""
    root = Path(folder).expanduser().resolve()
    file, _, method = trainer.rpartition(":")
    owner, _, fit = method.partition(".")
    try:
        loop = find_loop(Path(file).expanduser().resolve(), owner, fit, [root])
    except NotPlayable as error:
        raise ConfigError(Problem(f"{trainer}: {error}", field="trainer")) from None
    reward = find_reward(Path(program).expanduser().resolve(), [root]) if program else None
    if program and reward is None:
        raise ConfigError(Problem(f"{program} passes no reward_fn to a trainer", field="program"))
    return Checkout(root), loop, reward


@lru_cache(maxsize=1)
def tokenizer_of(model: tuple[tuple[str, Any], ...]) -> Any:
    """Load the model's tokenizer, with a padding token: verl takes the end token where there is none."""
    tokenizer = load_tokenizer(ModelConfig(**dict(model)))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


class TrainerParts:
    """The attributes of verl's trainer that the expressions of its loop read."""

    def __init__(self, tokenizer: Any, workers: Any, config: Any):
        self.tokenizer, self.actor_rollout_wg, self.config = tokenizer, workers, config


class _NoWorkers:
    """Sampling workers that answer nothing."""

    world_size = 1


def load(settings: Mapping[str, Any]) -> None:
    """Load the class that plays and the reward function; where the tokenizer is on this machine, make both, too.

    Raises: ConfigError for what cannot be imported or made.
    """
    checkout, loop, reward = opened(settings["trainer"], settings["folder"], settings.get("program"))
    _load_names(checkout, loop.site, [loop.made, loop.call])
    if reward is not None:
        _load_names(checkout, reward.site, [reward.value])
    try:
        tokenizer = tokenizer_of(tuple(settings["model"].items()))
    except RequestError:
        return  # reported with the model, which the hub may have
    config = OmegaConf.create(dict(settings.get("config") or {}))
    given: dict[str, Any] = {"self": TrainerParts(tokenizer, _NoWorkers(), config)}
    _make(checkout, loop.name, loop.site, loop.made, given, without=loop.batch)
    if reward is not None:
        _make(checkout, reward.name, reward.site, reward.value, {"config": config, "tokenizer": tokenizer})


def _make(
    checkout: Checkout, name: str, site: Site, value: ast.expr, given: Mapping[str, Any], *, without: str = ""
) -> None:  # fmt: skip
    """Evaluate the expression that makes an object, unless it reads the batch ``without``."""
    if without in _names([value], site):
        return
    try:
        Values(checkout, site, given).evaluated(value)
    except RequestError:
        raise
    except OSError as error:
        if error.filename is not None:
            raise ConfigError(loading_problem(error, checkout.folder, name)) from None
        # A server that is not there yet: the run starts later
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the fork's own code
        raise ConfigError(loading_problem(error, checkout.folder, name)) from None


def _load_names(checkout: Checkout, site: Site, values: list[ast.expr]) -> None:
    """Load what expressions read from the top of their file."""
    for name in _names(values, site) - {*site.assigned}:
        with suppress(NotBound):
            checkout.name(site.file, name)


def _names(values: list[ast.expr], site: Site) -> set[str]:
    """The names that expressions read, and those that the values of these read."""
    found: set[str] = set()
    left = list(values)
    while left:
        for node in ast.walk(left.pop()):
            if isinstance(node, ast.Name) and node.id not in found:
                found.add(node.id)
                left += [site.assigned[node.id]] if node.id in site.assigned else []
    return found
