"""Python files of a checkout as parsed sources: their imports, and the files that those name. Nothing is run."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.dialects.scripts.peer_trainers import BASES, Peer


@dataclass(frozen=True, slots=True)
class Import:
    """A name that a file imports."""

    module: str  # with the dots of a relative one
    name: str  # as the module has it

    @property
    def peer(self) -> Peer | None:
        peer = BASES.get(self.name)
        return peer if peer is not None and re.search(peer.modules, self.module) else None


def imports_of(source: ast.Module) -> dict[str, Import]:
    """Return every imported name, also inside functions."""
    return {
        each.asname or each.name: Import("." * node.level + (node.module or ""), each.name)
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom)
        for each in node.names
    }


def file_of(module: str, beside: Path, roots: Sequence[Path]) -> Path | None:
    """Return the file of a module that the file ``beside`` imports, below its folder or ``roots``; None without one."""
    if not module.strip("."):
        return None
    path = Path(*module.strip(".").split(".")).with_suffix(".py")
    above = len(module) - len(module.lstrip("."))
    places = [beside.parents[above - 1]] if 0 < above <= len(beside.parents) else [beside.parent, *roots]
    return next((place / path for place in places if (place / path).is_file()), None)


def parsed(file: Path) -> ast.Module | None:
    """Return a file's syntax tree; None for one that cannot be read or parsed."""
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
