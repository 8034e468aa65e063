"""Detection of a configuration's dialect and entry point from its keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.config.reading import hydra
from posttrain.config.reading.compose import read_yaml
from posttrain.config.reading.keys import has_key
from posttrain.config.reading.overrides import parse_overrides
from posttrain.dialects.entries import ENTRIES, Entry, entry_of
from posttrain.dialects.ledger import Ledger, leaves
from posttrain.dialects.loaded import LoadedConfig
from posttrain.dialects.versions import find_version
from posttrain.errors import ConfigError, Problem, did_you_mean

if TYPE_CHECKING:
    from posttrain.dialects.reader import Dialect

NAMES = ("native", "verl", "verl@0.1", "verl@0.2", "verl@0.4", "skyrl", "skyrl@2025-06", "skyrl@2025-08", "roll")

# Keys that only one dialect has, dotted where the first name alone is shared.
MARKS: dict[str, tuple[str, ...]] = {
    "native": (
        "model.path",
        "policy",
        "rollout",
        "run",
        "advantage",
        "loss",
        "validation",
        "data.prompts_per_step",
        "data.sequences_per_step",
        "data.files",
        "output",
        "metrics",
    ),
    "verl": (
        "actor_rollout_ref",
        "algorithm",
        "reward_model",
        "custom_reward_function",
        "model.partial_pretrain",
        "data.train_batch_size",
        "data.response_key",
        "data.output_path",
        "data.path",
        "data.n_samples",
        "data.prompt_key",
        "rollout.response_length",
        "evaluation",
        "数据",
        "自定义奖励函数",
        "优化器配置",
        "trainer.total_epochs",
        "trainer.n_gpus_per_node",
    ),
    "skyrl": (
        "generator",
        "environment",
        "trainer.policy",
        "trainer.placement",
        "trainer.algorithm",
        "data.train_data",
    ),
    "roll": (
        "actor_train",
        "actor_infer",
        "rollout_batch_size",
        "rewards",
        "exp_name",
        "pretrain",
        "custom_envs",
        "train_env_manager",
        "sft_train",
    ),
}
# What a defaults list may name: whose file it is, and of which entry.
PEER_FILES = {
    "ppo_trainer": ("verl", "train"),
    "ppo_megatron_trainer": ("verl", "train"),
    "sft_trainer": ("verl", "sft"),
    "sft_trainer_engine": ("verl", "sft"),
    "generation": ("verl", "generate"),
    "evaluation": ("verl", "evaluate"),
    "ppo_base_config": ("skyrl", "train"),
}


def read_config(
    path: str | None,
    overrides: Sequence[str],
    dialect: str | None,
    *,
    entry: Entry[Any] | None = None,
    or_entry: Entry[Any] | None = None,
    here: bool = False,
    drop_unknown: bool = False,
    skip_files: bool = False,
) -> LoadedConfig[Any]:
    """The configuration in the dialect it is written in, or in the one that is named.

    Args: ``entry`` is what the user asked for; None takes what the keys show. ``config`` is an ``entry.root``. ``or_entry`` is
        taken, too, where the keys show it.
        ``drop_unknown`` leaves out keys that no version of the dialect has; ``skip_files`` opens no file that it names.
    Raises: ConfigError for an unknown dialect, one that cannot be detected, a configuration of another entry than the
        requested one, and a file that cannot be read.
    """
    if path is not None and is_shipped(path) and not Path(path).expanduser().is_file():
        return _read_shipped(
            path,
            overrides,
            dialect,
            entries=tuple(each for each in (entry, or_entry) if each is not None),
            here=here,
            drop_unknown=drop_unknown,
            skip_files=skip_files,
        )
    if dialect is not None and dialect not in NAMES:
        raise ConfigError(
            Problem(f"there is no dialect {dialect!r} (known: {', '.join(NAMES)})", fix=did_you_mean(dialect, NAMES))
        )
    name, _, version = (dialect or detect(path, overrides)).partition("@")
    found = detect_entry(name, path, overrides, entry)
    if entry is not None and found not in (entry, or_entry):
        given = path or "KEY=VALUE ..."
        raise ConfigError(Problem(f"this is {found.title}: posttrain {found.name} {given}"))
    if name == "native":
        from posttrain.dialects import native

        if drop_unknown:
            what = "--drop-unknown is for other trainers' files: every key of a native one is read"
            raise ConfigError(Problem(what, where=path or "the command line", fix="remove the option"))
        return native.read(path, overrides, found, here=here)
    spoken = load_dialect(name)
    if found.name not in spoken.rules:
        what = f"{name} has no configuration for posttrain {found.name} that could be read"
        raise ConfigError(Problem(what, fix="write a native one", where=path or "the command line"))
    written = dict(leaves(read_yaml(path)[0])) if path is not None else {}
    options = {"here": here, "drop_unknown": drop_unknown, "skip_files": skip_files}
    return _read_spoken(spoken, path, overrides, found, version, written, options)


def _read_spoken(
    spoken: Dialect,
    path: str | None,
    overrides: Sequence[str],
    entry: Entry[Any],
    version: str,
    written: Mapping[str, Any],
    options: Mapping[str, bool],
) -> LoadedConfig[Any]:
    """The configuration of a peer's dialect, in the version that is named or that the written keys show."""
    from posttrain.dialects.reading import read_dialect

    version, warnings = _version(spoken, entry, version, written, overrides)
    loaded = read_dialect(spoken, path, overrides, entry=entry, version=version, **options)
    return replace(loaded, warnings=(*warnings, *loaded.warnings))


def _version(
    spoken: Dialect,
    entry: Entry[Any],
    version: str,
    written: Mapping[str, Any],
    overrides: Sequence[str],
) -> tuple[str, tuple[str, ...]]:
    """The version that is named, or else the one that the keys show, and what there is to say about that."""
    if version or spoken.unknown_keys != "refuse":
        return version, ()
    better = find_version(spoken.ledger.of(entry.name), written, parse_overrides(overrides))
    return (better.version, (better.said(spoken.name, spoken.ledger.version),)) if better is not None else ("", ())


def is_shipped(path: str) -> bool:
    """Return True when a path is only the name of a file shipped by a peer: ppo_megatron_trainer, ppo_trainer.yaml."""
    return path.removesuffix(".yaml") in PEER_FILES


def _read_shipped(
    path: str,
    overrides: Sequence[str],
    dialect: str | None,
    *,
    entries: tuple[Entry[Any], ...],
    here: bool,
    drop_unknown: bool,
    skip_files: bool,
) -> LoadedConfig[Any]:
    """The configuration that starts from a peer's own file, known by its name."""
    peer, kind = PEER_FILES[path.removesuffix(".yaml")]
    name, _, version = (dialect or peer).partition("@")
    found = ENTRIES[kind]
    if name != peer:
        raise ConfigError(Problem(f"{path} is a file of {peer}, and --dialect says {name}", fix=f"--dialect {peer}"))
    if entries and found not in entries:
        raise ConfigError(Problem(f"this is {found.title}: posttrain {found.name} {path}"))
    options = {"here": here, "drop_unknown": drop_unknown, "skip_files": skip_files}
    return _read_spoken(load_dialect(peer), path, overrides, found, version, {}, options)


def load_dialect(name: str):  # type: ignore[no-untyped-def]
    """The dialect of a peer, with its tables."""
    return import_module(f"posttrain.dialects.{name}").DIALECT


def detect_entry(dialect: str, path: str | None, overrides: Sequence[str], asked: Entry[Any] | None) -> Entry[Any]:
    """The entry whose keys a configuration in this dialect has; see ``entry_of``."""
    for name in _defaults_list(path):
        if name in PEER_FILES and PEER_FILES[name][0] == dialect:
            return ENTRIES[PEER_FILES[name][1]]
    # Hydra's own say nothing about an entry, whichever of them has rows for it
    keys = {key for key in _keys(path, overrides) | _keys(None, overrides) if key.partition(".")[0] != "hydra"}
    if dialect == "native":
        return entry_of(lambda entry, key: has_key(key, entry.root), keys, asked)
    table = cache(_ledger(dialect).of)
    return entry_of(lambda entry, key: _has(table(entry.name), key), keys, asked)


def _has(table: Ledger, key: str) -> bool:
    return table.find(key) is not None or table.is_section(key)


@cache
def _ledger(dialect: str) -> Ledger:
    if dialect == "native":
        from posttrain.dialects.native.ledger import native_ledger

        return native_ledger()
    ledger: Ledger = load_dialect(dialect).ledger
    return ledger


def has_no_effect(dialect: str, key: str, empty: bool, *, drop_unknown: bool = False) -> str:
    """Say why a key has no effect whatever its value is; "" for one that has.

    Args: ``empty``: an unset variable leaves its value empty in a shell. ``drop_unknown`` leaves out keys of no version.
    """
    from posttrain.dialects.known import Known
    from posttrain.dialects.own_keys import drops_any_value

    ledger = _ledger(dialect)
    row = ledger.find(key)
    if key.startswith(f"{hydra.SECTION}.") and key != f"{hydra.SECTION}.searchpath":
        return hydra.UNUSED
    if row is not None and row.status == "ignored" and not row.by_rule:
        return "it has no effect here"
    if row is not None and row.status in ("refused", "planned") and empty:
        return "empty it asks for nothing"
    drops = drop_unknown and drops_any_value(key, Known(ledger, ledger))
    return f"no version of {dialect} has it" if drops else ""


def takes_text(dialect: str, key: str) -> bool:
    """Tell whether a key takes texts of the user's own, such as paths, and no numbers that mean any."""
    from posttrain.dialects.converters import CONVERTERS
    from posttrain.dialects.value_types import choices, fits

    row = _ledger(dialect).find(key)
    if row is not None and row.name.endswith(".**"):  # a section without types: by the key's name
        return key.endswith(("path", "dir", "file", "folder"))
    if row is None or choices(row.type):
        return False
    numbers = fits(1, row.type) and row.to is not CONVERTERS["as_text"]
    return any(fits(text, row.type) for text in ("a", ["a"])) and not numbers


def takes_empty(dialect: str, key: str, *, drop_unknown: bool = False) -> bool:
    """Tell whether an empty text stands for an unset variable: in verl, where it is false under a key that is true or false,
    and with ``drop_unknown`` under a key of no version whose name speaks of no number; not in the typed sections of SkyRL."""
    from posttrain.dialects.own_keys import speaks_of_a_number
    from posttrain.dialects.value_types import fits

    ledger = _ledger(dialect)
    row = ledger.find(key)
    if dialect != "verl" or row is None:
        return dialect == "verl" and drop_unknown and not ledger.is_section(key) and not speaks_of_a_number(key)
    return fits(False, row.type) and not fits("", row.type)


def counts_devices(dialect: str, key: str) -> bool:
    """Tell whether a key says how many devices or machines there are, or share a sampler."""
    from posttrain.dialects.here import of_devices

    row = _ledger(dialect).find(key)
    return row is not None and of_devices(row)


def detect(path: str | None, overrides: Sequence[str]) -> str:
    """The dialect that the keys of the file, or of the overrides where there is no file, belong to.

    Raises: ConfigError when they could be of several, or of none.
    """
    keys = _keys(path, overrides)
    for name in _defaults_list(path):
        if name in PEER_FILES:
            return PEER_FILES[name][0]
    marks = {dialect: sorted(_present(MARKS[dialect], keys)) for dialect in MARKS}
    most = max(len(found) for found in marks.values())
    best = [dialect for dialect, found in marks.items() if len(found) == most]
    if most == 0 and path is None:
        return "native"
    if most and len(best) > 1:  # rare enough to read their tables for it
        known = {dialect: sum(_has(_ledger(dialect), key) for key in keys) for dialect in best}
        best = [dialect for dialect in best if known[dialect] == max(known.values())]
    if most == 0 or len(best) > 1:
        if path is not None and not keys:
            what = f"{path} holds no key"
            raise ConfigError(Problem(what, where=path, fix="write sections such as `model:` and `data:`"))
        what = "the keys do not show whose configuration this is"
        if most:
            what += f": {' and '.join(f'{marks[name][0]} ({name})' for name in best)}"
        raise ConfigError(
            Problem(what, fix=f"say it with --dialect {'|'.join(NAMES)}", where=path or "the command line")
        )
    return best[0]


def _defaults_list(path: str | None) -> list[str]:
    """The names of the files that a file starts from (Hydra's defaults list), without folders and packages."""
    listed = read_yaml(path)[0].get("defaults") if path is not None else None
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    return [name.partition("@")[0].rpartition("/")[2] for name in names]


def _keys(path: str | None, overrides: Sequence[str]) -> set[str]:
    """Every dotted key of the file, or of the overrides where there is no file."""
    if path is None:
        return {assignment.key for assignment in parse_overrides(overrides)}
    return set(read_yaml(path)[1])


def _present(marks: Iterable[str], keys: Iterable[str]) -> set[str]:
    return {mark for mark in marks if any(key == mark or key.startswith(f"{mark}.") for key in keys)}
