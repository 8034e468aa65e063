"""No module and no folder of the package imports itself in a circle: not in functions either, and not for typing alone."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Set
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from sources import FILES, PACKAGE, nodes_of


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in FILES:
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(path: Path, known: Set[str]) -> set[str]:
    """The package's modules that a file imports anywhere: at its top, in functions, and under ``if TYPE_CHECKING``."""
    names = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in known else node.module for name in inner}
    return names & known


def circle(graph: Mapping[str, Set[str]]) -> list[str]:
    """The first circle of a graph, as a path; empty when there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


@cache
def imports() -> dict[str, set[str]]:
    known = modules()
    return {name: imports_of(path, known.keys()) - {name} for name, path in known.items()}


def test_modules_have_no_circle() -> None:
    assert circle(imports()) == []


def test_folders_have_no_circle() -> None:
    def folder(name: str) -> str:
        return ".".join(name.split(".")[:2])

    graph: dict[str, set[str]] = {}
    for name, others in imports().items():
        graph.setdefault(folder(name), set()).update(folder(other) for other in others)
    assert circle({name: others - {name, "posttrain"} for name, others in graph.items()}) == []


def test_a_circle_is_found(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("if TYPE_CHECKING:\n    from b import C\n\ndef f():\n    import c.d\n")
    assert imports_of(file, {"b", "c.d"}) == {"b", "c.d"}
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) != [] and circle({"a": {"b"}, "b": set()}) == []
