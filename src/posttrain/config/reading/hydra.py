"""Hydra's own section of a file: the folders in which a defaults list finds its files, and the resolver ``${now:...}``.

The rest of the section (output folders, logging, launchers, sweeps) configures Hydra's own program, which does not run here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from posttrain.config.reading.sources import Place

SECTION = "hydra"
UNUSED = "it configures Hydra's own program; run.folder is where this run writes"


def search_path(values: Mapping[str, Any], file: Path) -> list[Path]:
    """The existing folders of ``hydra.searchpath``, in order.

    A relative ``file://`` folder is looked for in the current folder, as Hydra does, and then in the folders above the
    file, so that a file of a checkout is read from anywhere. ``pkg://`` names a package that need not be installed: what
    peers ship is known by name.
    """
    section = values.get(SECTION)
    listed = section.get("searchpath") if isinstance(section, dict) else None
    found = []
    for text in listed if isinstance(listed, list) else []:
        scheme, _, rest = str(text).partition("://")
        if scheme == "pkg":
            continue
        folder = Path(unquote(urlparse(str(text)).path) if rest.startswith("/") else rest or scheme).expanduser()
        places = (folder, *(above / folder for above in file.resolve().parents))
        found += [place for place in places if place.is_dir()][:1]
    return found


def set_aside(values: dict[str, Any], places: dict[str, Place]) -> dict[str, str]:
    """Take Hydra's section out of a configuration. Returns where each of its keys was written."""
    if values.pop(SECTION, None) is None:
        return {}
    keys = [key for key in places if key.split(".")[0] == SECTION]
    written = {key: places.pop(key).text for key in keys}
    return {key: where for key, where in written.items() if not any(other.startswith(f"{key}.") for other in written)}


@cache
def register_resolvers() -> None:
    """Make OmegaConf resolve what Hydra adds to it: ``${now:%Y-%m-%d}``, the time the process began to read its
    configuration, and ``${hydra:runtime.cwd}``."""
    from omegaconf import OmegaConf  # for the few configurations that it must read

    started = datetime.now()
    OmegaConf.register_new_resolver("now", started.strftime, replace=True)
    OmegaConf.register_new_resolver(SECTION, _runtime, replace=True)


def _runtime(key: str) -> str:
    if key == "runtime.cwd":
        return os.getcwd()
    raise ValueError(f"hydra:{key} belongs to Hydra's own program; hydra:runtime.cwd is known here")
