"""docs/reading.md is a tour that can be followed: its links lead to files, and its names to functions in them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reading.md"
MOST_LINES = 950  # of the nine files together; the page says about 900

LINK = re.compile(r"\[(`?)([^\]`]+)`?\]\(([^)#]+)\)")


def links() -> list[tuple[str, Path, bool]]:
    """Text, target, and whether the text is code."""
    found = LINK.findall(PAGE.read_text(encoding="utf-8"))
    return [(text, (PAGE.parent / target).resolve(), bool(tick)) for tick, text, target in found]


def names_in(file: Path) -> set[str]:
    """Functions and classes of a module, and methods as Class.method."""
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


def test_every_link_leads_somewhere() -> None:
    assert len(links()) > 30
    assert [str(target) for _, target, _ in links() if not target.is_file()] == []


def test_every_name_is_in_the_file_that_it_is_linked_to() -> None:
    named = [(text, target) for text, target, code in links() if code and target.suffix == ".py" and "/" not in text]
    assert len(named) > 20
    assert [f"{text} in {target.name}" for text, target in named if text not in names_in(target)] == []


def test_the_step_is_nine_files_that_can_be_read_in_an_afternoon() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| (\d) \| \[([^\]]+)\]\(\.\./src/posttrain/([^)]+)\)", text)
    assert [number for number, *_ in rows] == list("123456789")
    assert all(name == path for _, name, path in rows)
    lines = sum(len((ROOT / "src/posttrain" / path).read_text(encoding="utf-8").splitlines()) for *_, path in rows)
    assert lines <= MOST_LINES, f"the nine files have {lines} lines together"


def test_the_step_knows_no_disk() -> None:
    """The nine files import nothing that writes, reads or watches: no run, no loop, no engine, no path."""
    text = PAGE.read_text(encoding="utf-8")
    for path in re.findall(r"(?m)^\| \d \| \[[^\]]+\]\(\.\./src/posttrain/([^)]+)\)", text):
        source = (ROOT / "src/posttrain" / path).read_text(encoding="utf-8")
        assert not re.search(
            r"posttrain\.(run|loops|backends|build|cli)\b|^(import|from) (os|pathlib|json)\b", source
        ), path
