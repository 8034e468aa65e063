"""Python files of a checkout, found by the names that other files import, and parsed. Nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path


def file_of(module: str, beside: Path, roots: Sequence[Path]) -> Path | None:
    """Return the file of a module that the file ``beside`` imports, below its folder or ``roots``; None without one."""
    if not module.strip("."):
        return None
    path = Path(*module.strip(".").split(".")).with_suffix(".py")
    above = len(module) - len(module.lstrip("."))
    places = [beside.parents[above - 1]] if 0 < above <= len(beside.parents) else [beside.parent, *roots]
    return next((place / path for place in places if (place / path).is_file()), None)


def imported_names(source: ast.Module) -> dict[str, tuple[str, str]]:
    """Return every name that ``from MODULE import NAME`` binds, also inside functions: its module, with the dots of a relative
    one, and its name there."""
    return {
        each.asname or each.name: ("." * node.level + (node.module or ""), each.name)
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom)
        for each in node.names
    }


def parsed(file: Path) -> ast.Module | None:
    """Return a file's syntax tree; None for one that cannot be read or parsed."""
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
