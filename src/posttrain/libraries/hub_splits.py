"""The files of a split of a data set on the hub, as the library ``datasets`` finds them.

Source: the hub's documentation, "Configure your dataset" and "File names and splits": the YAML head of README.md names configs
with their files; without it a split's name stands in a folder or between the separators of a file's name, and files that name
no split are train.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from posttrain.errors import DataError, Problem, did_you_mean
from posttrain.libraries import yaml_text
from posttrain.libraries.hub_names import DATA_KINDS, HubName

NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}


def files_of(wanted: HubName, names: Sequence[str], readme: str, field: str) -> list[str]:
    """Choose among the ``names`` of a data set's files those that are meant, in order. Args: ``readme``, the text of README.md;
    ``field``, the setting that names the data set.

    Raises: DataError that lists what there is.
    """
    if wanted.files:
        try:
            chosen = matching(wanted.files, names)
        except re.error as error:
            what = f"{wanted.files} is not a pattern of files: {error.msg}"
            raise DataError(Problem(what, fix="write [a-z], or [[] for a bracket of a name", field=field)) from error
        return _readable(wanted, chosen, f"no file matches {wanted.files}", names, field)
    splits = _splits(wanted, names, readme, field)
    split = wanted.split or _default(wanted, splits, field)
    if split not in splits:
        listed = ", ".join(splits) or "none"
        fix = did_you_mean(split, list(splits), listed=True) or f"write {wanted.name}:SPLIT, or name files with hf://"
        raise DataError(Problem(f"{wanted.title} has no split {split} (splits: {listed})", fix=fix, field=field))
    return _readable(wanted, splits[split], f"the split {split} has no file", names, field)


def matching(pattern: str, names: Sequence[str]) -> list[str]:
    """Choose names by a pattern: * within a folder, ** across folders, ? a character, [...] one of these, [!...] none of
    these; a folder means all below it. Raises: re.error."""
    wanted = re.compile(_expression(pattern.strip("/")) + r"(?:/.*)?")
    return sorted(name for name in names if wanted.fullmatch(name))


def _expression(pattern: str) -> str:
    pieces = {"**/": r"(?:.*/)?", "**": r".*", "*": r"[^/]*", "?": r"[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)
    return "".join(pieces.get(part) or (_one_of(part) if part.startswith("[") else re.escape(part)) for part in parts)


def _one_of(brackets: str) -> str:
    inside = brackets[1:-1].replace("\\", r"\\")
    return f"[^{inside[1:]}]" if inside.startswith(("!", "^")) else f"[{inside}]"


def _splits(wanted: HubName, names: Sequence[str], readme: str, field: str) -> dict[str, list[str]]:
    try:
        configs = {str(each.get("config_name", "default")): each for each in _configs(readme)}
    except yaml.YAMLError as error:
        what = f"the head of {wanted.title}'s README.md is not YAML: {str(error).splitlines()[0]}"
        raise DataError(Problem(what, fix="name its files, hf://datasets/ORG/NAME/FILE", field=field)) from error
    config = wanted.config or ("default" if "default" in configs else "")
    config = config or next((name for name, each in configs.items() if each.get("default")), "")
    if not config and len(configs) == 1:
        [config] = configs
    if config and config not in configs:
        fix = did_you_mean(config, list(configs)) or f"write {wanted.name}:SPLIT, or name files with hf://"
        raise DataError(Problem(f"{wanted.title} has no config {config}", fix=fix, field=field))
    if configs and not config:
        listed = ", ".join(configs)
        fix = f"name one: {wanted.name}/{next(iter(configs))}:train"
        raise DataError(Problem(f"{wanted.title} has several configs: {listed}", fix=fix, field=field))
    chosen: Mapping[str, Any] = configs.get(config, {})
    folder = str(chosen.get("data_dir") or "").strip("/")
    below = [name for name in names if name.startswith(f"{folder}/")] if folder else list(names)
    if data := chosen.get("data_files"):
        return {split: _all(patterns, folder, below) for split, patterns in _by_split(data)}
    found: dict[str, list[str]] = {}
    for name in sorted(below):
        if name.lower().endswith(DATA_KINDS):
            found.setdefault(_split_of(name[len(folder) :]) or "", []).append(name)
    unnamed = found.pop("", [])
    return found or ({"train": unnamed} if unnamed else {})


def _configs(readme: str) -> list[Mapping[str, Any]]:
    head = re.match(r"---\r?\n(.*?)\r?\n---", readme, re.DOTALL)
    said = yaml_text.safe_load(head[1]) if head else None
    found = said.get("configs") if isinstance(said, dict) else None
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _by_split(data: Any) -> list[tuple[str, list[str]]]:
    found: dict[str, list[str]] = {}
    for each in data if isinstance(data, list) else [data]:
        said = each if isinstance(each, dict) else {"path": each}
        paths = said.get("path")
        listed = paths if isinstance(paths, list) else [paths]
        found.setdefault(str(said.get("split", "train")), []).extend(path for path in listed if isinstance(path, str))
    return list(found.items())


def _all(patterns: Sequence[str], folder: str, names: Sequence[str]) -> list[str]:
    found = [name for pattern in patterns for name in matching(f"{folder}/{pattern}" if folder else pattern, names)]
    return list(dict.fromkeys(found))


def _split_of(name: str) -> str:
    """The split that a path names: in its last part that names one."""
    # A split of any name, as push_to_hub writes it
    shards = re.search(r"(?:^|/)data/([\w.]+)-\d{5}-of-\d{5}", name)
    if shards:
        return shards[1]
    for part in reversed(name.lower().split("/")):
        words = set(re.split(r"[^a-z]+", part))
        for split, marks in NAMES.items():
            if words & set(marks):
                return split
    return ""


def _default(wanted: HubName, splits: Mapping[str, object], field: str) -> str:
    if len(splits) == 1 or "validation" not in field:
        return "train" if "train" in splits or len(splits) != 1 else next(iter(splits))
    listed = ", ".join(splits)
    what = f"{wanted.title} has several splits: {listed}"
    raise DataError(Problem(what, fix=f"name the one to validate on: {wanted.name}:SPLIT", field=field))


def _readable(wanted: HubName, chosen: list[str], none: str, names: Sequence[str], field: str) -> list[str]:
    kinds = {kind: [name for name in chosen if name.lower().endswith(kind)] for kind in DATA_KINDS}
    found = [kind for kind, those in kinds.items() if those]
    if not found:
        there = ", ".join(sorted(names)[:8]) or "nothing"
        what = f"{wanted.title}: {none} of a kind that is read here ({', '.join(DATA_KINDS)})"
        raise DataError(
            Problem(what, fix=f"name its files, hf://datasets/{wanted.name}/…; there are {there}", field=field)
        )
    if len(found) > 1:
        fix = f"name those of one kind: hf://datasets/{wanted.name}/**{found[0]}"
        raise DataError(Problem(f"{wanted.title} has files of several kinds: {', '.join(found)}", fix=fix, field=field))
    return kinds[found[0]]
