"""A fork's class that plays the episodes (the environment verl_loop), and the keys that it reads."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from posttrain.dialects.reader import Reader
from posttrain.dialects.trees import value_at
from posttrain.dialects.words import OUR_SECTION
from posttrain.verl_episodes import EpisodeLoop, EpisodeReward, NotPlayable, find_loop, find_reward

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
