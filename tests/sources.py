"""The package's own source files, each parsed once in a process of a test run: several tests read all of them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import posttrain

PACKAGE = Path(posttrain.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return every node of a file's syntax tree. Do not change them."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
