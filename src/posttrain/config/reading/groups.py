"""Options that an override adds from the folders of ``hydra.searchpath``: ``+reward=mine`` adds what reward/mine.yaml holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.config.reading import hydra
from posttrain.config.reading.defaults import own_package, read_with_defaults
from posttrain.config.reading.interpolations import merged
from posttrain.config.reading.overrides import Assignment
from posttrain.config.reading.sources import Place


def add_groups(assignments: Sequence[Assignment], values: dict[str, Any], places: dict[str, Place]) -> list[Assignment]:
    """Lay the files that ``+group=option`` names upon the values, in order. Returns the other overrides.

    The folders are those of an override of hydra.searchpath; an override that names no file there is one like all others.
    A file stands below its group, or where its own line ``# @package`` says.
    Raises: ConfigError for a file that cannot be read.
    """
    listed = [one.value for one in assignments if one.key == f"{hydra.SECTION}.searchpath"]
    folders = hydra.search_path({hydra.SECTION: {"searchpath": listed[-1]}}, Path("overrides")) if listed else []
    rest = []
    for one in assignments:
        group = one.key.replace(".", "/")
        file = _option(folders, group, one.value) if one.action in ("add", "force") else None
        if file is None:
            rest.append(one)
            continue
        more, more_places = read_with_defaults(str(file), {})
        said = own_package(file)
        package = group.replace("/", ".") if said is None else said
        for part in reversed(package.split(".") if package else []):
            more = {part: more}
        prefix = f"{package}." if package else ""
        merged(values, more)
        places.update({f"{prefix}{key}": place for key, place in more_places.items()})
    return rest


def _option(folders: Sequence[Path], group: str, option: object) -> Path | None:
    """The file of an option in the first folder that has it."""
    if not isinstance(option, str) or not option:
        return None
    files = (folder / group / f"{option.removesuffix('.yaml')}.yaml" for folder in folders)
    return next((file for file in files if file.is_file()), None)
