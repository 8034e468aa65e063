"""The environment gem_class: the module of the class must be there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.errors import Problem
from posttrain.registry import ENV_CHECKS


@ENV_CHECKS.register("gem_class")
def gem_class(settings: Mapping[str, Any], field: str) -> Iterator[Problem]:
    where, root = str(settings.get("path", "")), settings.get("root")
    module, _, name = where.rpartition(":")
    if not module or not name.isidentifier():
        yield Problem(
            f"{where!r} names no class", fix="use package.module:Class or file.py:Class", field=f"{field}.path"
        )
        return
    if module.endswith(".py"):
        found = Path(module).expanduser().is_file()
    else:
        below = Path(str(root)).expanduser().joinpath(*module.split(".")) if root else None
        found = below is None or below.with_suffix(".py").is_file() or (below / "__init__.py").is_file()
    if not found:
        yield Problem(f"there is no module {module}{f' in {root}' if root else ''}", fix="name the file that holds the class",
                      field=f"{field}.path")  # fmt: skip
