"""Hydra's defaults lists: a file that names other files to start from.

``defaults: [ppo_trainer, _self_, ../config/traj_envs@_here_, optimizer: adam]``. Later entries win over earlier ones; the
file itself stands where ``_self_`` is, or last. Source: Hydra 1.3, "The Defaults List".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from posttrain.config.reading.compose import read_yaml
from posttrain.config.reading.hydra import search_path
from posttrain.config.reading.interpolations import merged
from posttrain.config.reading.sources import Place
from posttrain.errors import ConfigError, Problem, did_you_mean

Tree = dict[str, Any]
Places = dict[str, Place]


# The option of another entry's group, in an entry: ${model_engine}_actor.
_OPTION = re.compile(r"\$\{([\w/]+)\}")
# Where a file's own first lines put it, unless the entry that names it does.
_PACKAGE_LINE = re.compile(r"^#\s*@package\s+([\w.]+)", re.MULTILINE)
# An override such as optim=megatron or model@actor.model=big: group, package, option.
_CHOICE = re.compile(r"\+{0,2}([\w/]+)(?:@([\w.]*))?=([\w./-]+)")


@dataclass(frozen=True, slots=True)
class DefaultsEntry:
    """One line of a defaults list."""

    name: str  # a file without .yaml, or _self_
    package: str  # dotted place below which it is put; "" is the top
    optional: bool
    group: str = ""  # the folder whose files are options, for an entry of the form group: option
    placed: bool = False  # the entry itself says where: @package
    overrides: bool = False  # chooses another option for an entry of the files that this list names

    @property
    def choice(self) -> tuple[str, str]:
        """Name the entry as an override does that chooses another option: the group and its package."""
        return self.group.rpartition("/")[2] if self.group.startswith(".") else self.group.strip("/"), self.package


Choices = Mapping[tuple[str, str], str]
# Of a file that a peer ships: by group the options and what each holds otherwise than the file, from the top
Options = Mapping[str, Mapping[str, Tree]]


def split_choices(
    path: str | None, overrides: Sequence[str], shipped: Mapping[str, Options] | None = None
) -> tuple[dict[tuple[str, str], str], list[str]]:
    """Split overrides. Returns: those that choose another file for an entry of the defaults list, ``optim=megatron``, by group
    and package; and all others. ``shipped`` holds the options of files that are known by their names."""
    listed = read_yaml(path)[0].get("defaults") if path is not None and Path(path).expanduser().is_file() else None
    entries = [_entry(one) for item in listed for one in _options(item)] if isinstance(listed, list) else []
    known = {entry.choice for entry in entries if entry is not None and entry.group}
    known |= {(group, group) for group in _shipped_options(path, shipped)}
    choices: dict[tuple[str, str], str] = {}
    rest = []
    for text in overrides:
        match = _CHOICE.fullmatch(text)
        group = match[1].strip("/") if match else ""
        place = (group, group.replace("/", ".") if match and match[2] is None else match[2] if match else "")
        if match and place in known:
            choices[place] = match[3]
        else:
            rest.append(text)
    return choices, rest


def _shipped_options(path: str | None, shipped: Mapping[str, Options] | None) -> Options:
    """The groups of a file that is known by its name; none for one on this disk."""
    if path is None or shipped is None or Path(path).is_file():
        return {}
    return shipped.get(path.removesuffix(".yaml"), {})


def read_with_defaults(
    path: str,
    built_in: Mapping[str, Callable[[], Tree]],
    choices: Choices | None = None,
    shipped: Mapping[str, Options] | None = None,
) -> tuple[Tree, Places]:
    """The file laid upon what its defaults list names.

    Args: ``built_in`` holds, by name, what a peer ships and users refer to (``ppo_trainer``); it is used where no file of
        that name lies beside the user's, and for a ``path`` that is no more than such a name. Its keys have no place: they
        count as defaults. ``choices`` are those of ``split_choices``, ``shipped`` the options of such names.
    Raises: ConfigError for files that cannot be read, an entry that names nothing, files that name each other in a circle.
    """
    if path.removesuffix(".yaml") in built_in and not Path(path).is_file():
        tree = built_in[path.removesuffix(".yaml")]()
        for (group, _), option in (choices or {}).items():
            options = _shipped_options(path, shipped).get(group, {})
            if option not in options:
                what = f"there is no option {option!r} of {group} (known: {', '.join(options)})"
                fix = did_you_mean(option, options, listed=True)
                raise ConfigError(Problem(what, fix=fix, where=f"override {group}={option}"))
            merged(tree, options[option])
        return tree, {}
    search = _Search(root=Path(path).parent, built_in=built_in, choices=choices or {})
    return _read(Path(path), search, chain=())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """The places in which the files of a defaults list are found."""

    root: Path  # the folder of the user's file, where names that begin with / start
    built_in: Mapping[str, Callable[[], Tree]]
    folders: tuple[Path, ...] = ()  # hydra.searchpath of the user's file
    choices: Choices = field(default_factory=dict)  # of the command line, for the user's file

    def candidates(self, name: str, folder: Path) -> list[Path]:
        """Files that a name in a file of ``folder`` may mean, the first that exists is meant."""
        file = f"{name.removesuffix('.yaml')}.yaml"
        first = self.root if name.startswith("/") else folder
        return [place / file.lstrip("/") for place in (first, *self.folders)]


def _read(path: Path, search: _Search, chain: tuple[Path, ...]) -> tuple[Tree, Places]:
    own, own_places = read_yaml(str(path))
    if not chain:
        search = replace(search, folders=tuple(search_path(own, path)))
    if "defaults" not in own:
        return own, own_places
    where = own_places["defaults"].text
    if path.resolve() in chain:
        raise ConfigError(Problem(f"{path.name} leads back to itself through its defaults list", where=where))
    listed = _entries(own.pop("defaults"), own_places)
    above = {entry.choice: entry.name.rpartition("/")[2] for entry in listed if entry.overrides}
    search = replace(search, choices={**above, **search.choices})
    entries = _with_options([_chosen(entry, search.choices) for entry in listed if not entry.overrides])
    chain = (*chain, path.resolve())
    own_places = {key: place for key, place in own_places.items() if key.split(".")[0] != "defaults"}
    if not any(entry.name == "_self_" for entry in entries):
        entries.append(DefaultsEntry("_self_", "", optional=False))
    values: Tree = {}
    places: Places = {}
    for entry in entries:
        package = entry.package
        if entry.name == "_self_":
            more, more_places = own, own_places
        else:
            more, more_places, says = _named(entry, path, search, chain, where)
            package = package if says is None else says
        if not more:
            continue
        for part in reversed(package.split(".") if package else []):
            more = {part: more}
        prefix = f"{package}." if package else ""
        merged(values, more)
        places.update({f"{prefix}{key}": place for key, place in more_places.items()})
    return values, places


def _chosen(entry: DefaultsEntry, choices: Choices) -> DefaultsEntry:
    """The entry, with the option that the command line chooses for its group."""
    option = choices.get(entry.choice) if entry.group else None
    return entry if option is None else replace(entry, name=f"{entry.group}/{option}")


def _with_options(entries: Sequence[DefaultsEntry]) -> list[DefaultsEntry]:
    """The entries, with the options of groups in place of ${group}."""
    options = {entry.group: entry.name.rpartition("/")[2] for entry in entries if entry.group}
    return [
        replace(entry, name=_OPTION.sub(lambda found: options.get(found[1], found[0]), entry.name)) for entry in entries
    ]


def own_package(file: Path) -> str | None:
    """The package that a file's own line ``# @package a.b`` names; None without one."""
    found = _PACKAGE_LINE.search(file.read_text(encoding="utf-8").partition("\n\n")[0])
    return None if found is None else _package(found[1], "")


def _named(
    entry: DefaultsEntry, user: Path, search: _Search, chain: tuple[Path, ...], where: str
) -> tuple[Tree, Places, str | None]:
    """The values of an entry's file, their places, and the package that the file itself names where the entry names none."""
    candidates = search.candidates(entry.name, user.parent)
    for candidate in candidates:
        if candidate.is_file():
            return *_read(candidate, search, chain), None if entry.placed else own_package(candidate)
    name = entry.name.rpartition("/")[2]
    if name in search.built_in:
        return search.built_in[name](), {}, None
    if entry.optional:
        return {}, {}, None
    file = candidates[0]
    beside = [other.stem for other in file.parent.glob("*.yaml")] if file.parent.is_dir() else []
    raise ConfigError(
        Problem(
            f"the defaults list names {entry.name}, and there is no file {file}",
            fix=did_you_mean(name, [*beside, *search.built_in]),
            where=where,
        )
    )


def _entries(listed: Any, places: Places) -> list[DefaultsEntry]:
    """The entries in order; those about Hydra itself are left out."""
    if not isinstance(listed, list):
        raise ConfigError(Problem("defaults must be a list of file names", where=places["defaults"].text))
    entries, problems = [], []
    for index, item in enumerate(listed):
        for one in _options(item):
            entry = _entry(one)
            if entry is None:
                where = places.get(f"defaults.{index}", places["defaults"]).text
                problems.append(
                    Problem(f"{one!r} is no entry of a defaults list", fix="write a file name", where=where)
                )
            elif not entry.name.startswith(("hydra/", "override hydra/")):
                entries.append(entry)
    if problems:
        raise ConfigError(problems)
    return entries


def _options(item: Any) -> list[Any]:
    """Return the entry for each option of ``group: [first, second]``, which are laid upon each other in their order."""
    if isinstance(item, dict) and len(item) == 1:
        [(group, options)] = item.items()
        if isinstance(options, list):
            return [{group: option} for option in options]
    return [item]


def _entry(item: Any) -> DefaultsEntry | None:
    """``name``, ``path/name@package``, ``group: name``, ``optional group: name``."""
    if isinstance(item, str):
        text, package = _split_package(item)
        optional = text.startswith("optional ")
        name = text.removeprefix("optional ").strip()
        group = "" if name.startswith((".", "/")) else name.rpartition("/")[0]
        return DefaultsEntry(name, _package(package, group), optional, placed=package is not None)
    if isinstance(item, dict) and len(item) == 1:
        [(key, value)] = item.items()
        text, package = _split_package(str(key))
        optional = text.startswith("optional ")
        overrides = text.startswith("override ") and not text.startswith("override hydra/")
        group = text.removeprefix("optional ").removeprefix("override ").strip()
        if value is None:  # Hydra's way of naming nothing
            return DefaultsEntry("_nothing_", "", optional=True)
        if not isinstance(value, str):
            return None
        return DefaultsEntry(
            f"{group}/{value}", _package(package, group), optional, group, package is not None, overrides
        )
    return None


def _split_package(text: str) -> tuple[str, str | None]:
    name, at, package = text.partition("@")
    return name, package if at else None


def _package(package: str | None, group: str) -> str:
    if package in ("_here_", "_global_"):
        return ""
    return group.strip("/").replace("/", ".") if package is None else package
