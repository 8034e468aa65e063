"""Environments that a fork of ROLL registers, found in the checkout that the configuration lies in; parsed, never run."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from posttrain.dialects.reader import Reader

_REGISTRY = Path("roll", "pipeline", "agentic", "env", "__init__.py")


def of_fork(keys: Reader, kind: str, config: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return the environment and settings of a class that the fork registers under a name, ``gem.register("mine",
    entry_point="module:Class")``; None without one."""
    root = _checkout(keys.sources.file)
    place = _registrations(root / _REGISTRY).get(kind) if root else None
    if root is None or place is None:
        return None
    keys.warn(f"env_type={kind} is a class of your own: {place} in {root}")
    return "gem_class", {"path": place, "root": str(root), "options": dict(config)}


def file_of_class(keys: Reader, dotted: str) -> Path | None:
    """Return the file of ``package.module.Class`` in a checkout of a fork: below a folder above the configuration, or the current
    one. None without a file that defines the class."""
    module, _, name = dotted.rpartition(".")
    above = Path(keys.sources.file).resolve().parents if keys.sources.file else ()
    places = (folder.joinpath(*module.split(".")).with_suffix(".py") for folder in (*above, Path.cwd()) if module)
    found = next((place for place in places if place.is_file()), None)
    return found if found is not None and f"class {name}" in found.read_text("utf-8", errors="replace") else None


def _checkout(file: str | None) -> Path | None:
    """Return the folder above a configuration, or the current one, that holds the fork's package."""
    above = Path(file).resolve().parents if file else ()
    return next((folder for folder in (*above, Path.cwd()) if (folder / _REGISTRY).is_file()), None)


@cache
def _registrations(file: Path) -> dict[str, str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, ValueError, SyntaxError):
        return {}
    found = {}
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or ast.unparse(call.func).rpartition(".")[2] != "register":
            continue
        given = dict(zip(("env_id", "entry_point"), call.args, strict=False))
        given |= {("env_id" if each.arg == "id" else str(each.arg)): each.value for each in call.keywords}
        texts = {name: each.value for name, each in given.items() if isinstance(each, ast.Constant)}
        if isinstance(texts.get("env_id"), str) and ":" in str(texts.get("entry_point", "")):
            found[str(texts["env_id"])] = str(texts["entry_point"])
    return found
