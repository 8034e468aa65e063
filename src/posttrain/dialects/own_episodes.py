"""A fork's class that plays the episodes (the environment verl_loop), and the keys that it reads."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.trees import NOTHING, nested, value_at
from posttrain.dialects.words import OUR_SECTION
from posttrain.verl_episodes import EpisodeLoop, EpisodeReward, NotPlayable, find_loop, find_reward
from posttrain.verl_sites import Site

_OURS = f"{OUR_SECTION}.environment"


def loop_of(keys: Reader) -> tuple[EpisodeLoop, EpisodeReward | None] | None:
    """The class that plays, and the reward function of its program; None where no such class does."""
    if keys.ledger.dialect != "verl" or value_at(keys.values, f"{_OURS}.name") != "verl_loop":
        return None
    given = [value_at(keys.values, f"{_OURS}.settings.{name}") for name in ("trainer", "folder", "program")]
    trainer, folder, program = (each if isinstance(each, str) else "" for each in given)
    try:
        return _found(trainer, folder, program)
    except NotPlayable as error:
        keys.problem(f"{trainer}: {error}", key=f"{_OURS}.settings.trainer")
        return None


@lru_cache(maxsize=8)
def _found(trainer: str, folder: str, program: str) -> tuple[EpisodeLoop, EpisodeReward | None]:
    file, _, method = trainer.rpartition(":")
    owner, _, fit = method.partition(".")
    builds = Path(program) if program else None
    loop = find_loop(Path(file), owner, fit, [Path(folder)], builds)
    return loop, find_reward(builds, [Path(folder)]) if builds else None


def values_of(keys: Reader, sites: Iterable[tuple[str, Site]]) -> dict[str, Any]:
    """The values of the keys that expressions read, as a tree; what is lacking is reported under the name of the site. A key read
    with a default may be lacking, and has its section."""
    found: dict[str, Any] = {}
    defaulted: list[str] = []
    for name, site in sites:
        for key in sorted(site.keys):
            value = value_at(keys.values, key)
            row = keys.ledger.find(key)
            if value is NOTHING and row is not None:
                value = keys[key]
            if value is not NOTHING:
                found[key] = value
            elif key in site.optional:
                defaulted.append(key)
            elif not any(each.field == key for each in keys.problems):
                what = f"{name} is built with {key}, which the configuration does not have"
                keys.problem(what, key=key, fix=f"add {key}=VALUE")
    tree = nested(found)
    for key in defaulted:
        section = tree
        for part in key.split(".")[:-1]:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                break
    return tree


def keys_read(keys: Reader) -> set[str]:
    """The keys of the user's own that the class that plays, its trainer's loop or its reward function reads."""
    found = loop_of(keys)
    if found is None:
        return set()
    loop, scores = found
    read = {*(key for site in loop.sites for key in site.keys), *loop.copies, loop.guard, loop.masking} | (
        set(scores.site.keys) if scores is not None else set()
    )
    return {each.key for each in keys.own if ("" in read and _is_named(each.key, found)) or _below(each.key, read)}


def _below(key: str, read: set[str]) -> bool:
    return any(f"{key}.".startswith(f"{one}.") for one in read if one)


def _is_named(key: str, found: tuple[EpisodeLoop, EpisodeReward | None]) -> bool:
    """Return True for a key whose last name stands in a file that gets the whole configuration."""
    loop, scores = found
    sites = [*loop.sites, *([scores.site] if scores is not None else [])]
    files = [site.file for site in sites if "" in site.keys]
    return any(f".{key.rpartition('.')[2]}" in file.read_text("utf-8", errors="replace") for file in files)
