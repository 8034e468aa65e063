"""Estimators and losses of the user's own: known before a dialect's rules look at their names.

They are registered by modules (``model.external_modules``), or written for verl or SkyRL: in a file that is named, in one that
verl itself would import, or in the checkout of a fork in the current folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from posttrain.dialects.checkout_managers import MANAGERS, handed_to, manager_in_checkout
from posttrain.dialects.env_managers import ESTIMATOR, plays_managers, read_by_managers
from posttrain.dialects.ledger import Key, Ledger, leaves
from posttrain.dialects.own_episodes import keys_read, values_of
from posttrain.dialects.own_scoring import changed_manager, read_by_rewards
from posttrain.dialects.reader import Reader
from posttrain.dialects.trees import nested, value_at
from posttrain.dialects.words import OUR_SECTION
from posttrain.registry import ADVANTAGES, POLICY_LOSSES, Registry, plug_in
from posttrain.user_files import PACKAGE
from posttrain.verl_advantages import TRAINER
from posttrain.verl_functions import CONFIG

RUNNER = "skyrl_agent"  # the environment, and the package
_FIELD = "model.external_modules"
_REGISTRIES: dict[str, Registry[Any]] = {"advantage.name": ADVANTAGES, "loss.name": POLICY_LOSSES}

# Files that the process which estimates advantages imports in verl, by the key that names them
_FILES = ("custom_reward_function.path", "reward.custom_reward_function.path")
# The key that chooses the function -> our field, and the section that the function gets as its config
_SECTIONS = {
    "algorithm.adv_estimator": ("advantage.name", "algorithm"),
    "trainer.algorithm.advantage_estimator": ("advantage.name", "trainer.algorithm"),
    "actor_rollout_ref.actor.policy_loss.loss_mode": ("loss.name", "actor_rollout_ref.actor"),
    "trainer.algorithm.ppo_loss_type": ("loss.name", "trainer.algorithm"),
    "trainer.algorithm.policy_loss_type": ("loss.name", "trainer.algorithm"),
}
_CHECKOUT = "verl/trainer/ppo/core_algos.py"
_OUTSIDE = re.compile(r"^\s*(?:import|from)\s+((?!verl\b)\w+(?:\.\w+)+)", re.MULTILINE)


def plug_in_named(ledger: Ledger, values: dict[str, Any]) -> None:
    """Make the names known that the modules of a configuration register, whatever key names these. Nothing is imported."""
    keys = [row.name for row in ledger.rows if _FIELD in row.fields] + [f"{OUR_SECTION}.{_FIELD}"]
    for key in keys:
        found = value_at(values, key)
        modules = found if isinstance(found, list) else [found]
        plug_in(module for module in modules if isinstance(module, str) and module)


def own_path(reader: Reader, field: str, name: str) -> str | None:
    """The file, or pkg://module, that holds the estimator (``advantage.name``) or loss (``loss.name``) of this name, which the
    peer does not have; None where it is not found."""
    section = field.partition(".")[0]
    named = value_at(reader.values, f"{OUR_SECTION}.{section}.path")
    if isinstance(named, str):
        return named  # looked at with the other fields
    registry = _REGISTRIES[field]
    return next((path for path in _places(reader) if registry.written_for_verl(name, path)), None)


def _places(reader: Reader) -> Iterator[str]:
    for row in reader.ledger.rows:
        if _FIELD in row.fields:
            found = value_at(reader.values, row.name)
            for module in found if isinstance(found, list) else [found]:
                if isinstance(module, str) and module:
                    yield f"{PACKAGE}{module}"
    for key in _FILES:
        if isinstance(found := value_at(reader.values, key), str):
            yield found
    if reader.ledger.dialect == "verl" and Path(_CHECKOUT).is_file():
        yield _CHECKOUT
    if plays_managers(reader) and Path(TRAINER).is_file():
        yield TRAINER
    if reader.ledger.dialect == "verl":
        yield from _beside_the_package(str(Path.cwd()))


@lru_cache(maxsize=8)
def _beside_the_package(folder: str) -> tuple[str, ...]:
    """Files of a checkout that its copy of verl's package imports from outside of it, as a worker imports a recipe's losses."""
    found: dict[str, None] = {}
    for file in sorted((Path(folder) / "verl").rglob("*.py")):
        for module in _OUTSIDE.findall(file.read_text(encoding="utf-8", errors="replace")):
            path = Path(*module.split(".")).with_suffix(".py")
            if (Path(folder) / path).is_file():
                found[str(path)] = None
    return tuple(found)


def is_own(reader: Reader, row: Key, value: Any) -> bool:
    """Return True for the name of an estimator or loss of the user's own, given to a key that takes the peer's names."""
    if not isinstance(value, str):
        return False
    if value == ESTIMATOR and "advantage.name" in row.fields and plays_managers(reader):
        return True
    return any(
        value in registry.plugged() or own_path(reader, field, value) is not None
        for field, registry in _REGISTRIES.items()
        if field in row.fields
    )


def settings_of_own(keys: Reader, key: str, name: str) -> dict[str, Any]:
    """The fields of an estimator or loss of the user's own, which ``key`` names: its file, its settings by the keys of that name
    in the section that verl hands over, and that section as ``config``, as far as the file reads it. Empty for a known name."""
    field, section = _SECTIONS[key]
    registry = _REGISTRIES[field]
    path = None if registry.is_built_in(name) or name in registry.plugged() else own_path(keys, field, name)
    if path is None:
        return {}
    at = field.partition(".")[0]
    found: dict[str, Any] = {f"{at}.path": path}
    theirs = registry.written_for_verl(name, path)
    if theirs is None:
        return found
    if theirs.in_trainer is not None:
        line = f"line {theirs.in_trainer.line} of {path}"
        keys.warn(f"{name} is yours: {theirs.definition.name}, {line}, as the loop calls it, in a process of its own")
        return found | {f"{at}.{CONFIG}": values_of(keys, [(f"{name} ({line})", theirs.in_trainer.site)])}
    written = _leaves_of(keys, section)
    found |= {f"{at}.{each}": written[each] for each in theirs.settings if each in written}
    if CONFIG in theirs.settings:
        # The reduction tells what the run does with the losses that it returns
        always = ("loss_reduction",) if theirs.is_for_skyrl else ()
        read = {each: value for each, value in written.items() if each in always or theirs.may_read(each)}
        found[f"{at}.{CONFIG}"] = nested(read)
    if theirs.columns:
        found["data.extra_columns"] = theirs.columns
    keys.warn(f"{name} is yours: {theirs.definition.name} of {path}, line {theirs.definition.lineno}")
    return found


def read_by_own(keys: Reader) -> set[str]:
    """Keys of the user's own that an estimator, a loss or a program of the user's own reads."""
    found: set[str] = (
        _read_by_program(keys)
        | _read_by_runner(keys)
        | _read_by_manager(keys)
        | keys_read(keys)
        | read_by_managers(keys)
    )
    found |= read_by_rewards(keys)
    for key, (field, section) in _SECTIONS.items():
        name = value_at(keys.values, key)
        registry = _REGISTRIES[field]
        if not isinstance(name, str) or registry.is_built_in(name):
            continue
        path = own_path(keys, field, name)
        theirs = registry.written_for_verl(name, path) if path else None
        if theirs is not None and theirs.in_trainer is not None:
            found |= {each.key for each in keys.own} & {*theirs.in_trainer.site.keys, *theirs.in_trainer.others}
        elif theirs is not None:
            below = (each.key for each in keys.own if each.key.startswith(f"{section}."))
            found |= {each for each in below if theirs.may_read(each.removeprefix(f"{section}."))}
    return found


def _read_by_program(keys: Reader) -> set[str]:
    """Keys of the user's own beside a program on SkyRL that plays the episodes, and reads its overrides: those whose last names
    stand in its files, and all below a section of its own."""
    file = value_at(keys.values, f"{OUR_SECTION}.environment.settings.file")
    if value_at(keys.values, f"{OUR_SECTION}.environment.name") != "skyrl_program" or not isinstance(file, str):
        return set()
    words: set[str] = set()
    for each in Path(file).parent.rglob("*.py"):
        words |= set(re.findall(r"\w+", each.read_text(encoding="utf-8", errors="replace")))

    def reads(key: str) -> bool:
        section = key.partition(".")[0]
        return key.rpartition(".")[2] in words or (section in words and not keys.ledger.is_section(section))

    return {each.key for each in keys.own if reads(each.key)}


def _read_by_runner(keys: Reader) -> set[str]:
    """Keys of the user's own beside a runner of skyrl-agent's: those whose last names stand in the package's files. Outside of
    its own section they are for its trainer, which is not called: that is reported."""
    folder = value_at(keys.values, f"{OUR_SECTION}.environment.settings.folder")
    if value_at(keys.values, f"{OUR_SECTION}.environment.name") != RUNNER or not isinstance(folder, str):
        return set()
    words: set[str] = set()
    for each in (Path(folder) / RUNNER / "integrations").rglob("*.py"):
        words |= set(re.findall(r"\w+", each.read_text(encoding="utf-8", errors="replace")))
    found = {each.key for each in keys.own if each.key.rpartition(".")[2] in words}
    for key in sorted(found):
        if not key.startswith(f"{RUNNER}."):
            keys.warn(f"{key} is read by skyrl-agent's own trainer, which is not called: it has no effect")
    return found


def _read_by_manager(keys: Reader) -> set[str]:
    """Keys of the user's own that a fork's program hands to the reward manager which it chooses by name."""
    name = value_at(keys.values, "reward_model.reward_manager") if keys.ledger.dialect == "verl" else None
    if not isinstance(name, str):
        return set()
    found = changed_manager(name) if name in MANAGERS else manager_in_checkout(name)
    handed = [each.key for each in handed_to(found[1], found[0]) if each.key] if found else []
    return {each.key for each in keys.own if any(f"{each.key}.".startswith(f"{one}.") for one in handed)}


def _leaves_of(keys: Reader, section: str) -> dict[str, Any]:
    """The values below a section by their names in it, with the peer's defaults."""
    rows = [row.name for row in keys.ledger.rows if row.name.startswith(f"{section}.") and "*" not in row.name]
    found = {name.removeprefix(f"{section}."): keys[name] for name in rows}
    return {key: value for key, value in (found | dict(leaves(keys.section(section)))).items() if value is not None}
