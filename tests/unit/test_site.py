"""The site: every page is in its order, and its start page and its links are made of files that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
NOTEBOOKS = {f"notebook-{path.stem}.md" for path in (ROOT / "examples" / "notebooks").glob("*.ipynb")}
GENERATED = {"index.md", *(f"keys-{dialect}.md" for dialect in ("native", "verl", "skyrl", "roll"))}  # by make docs
GENERATED |= NOTEBOOKS
LINK = re.compile(r"\]\((?!https?:|#)([^)\s#]+)(?:#[^)\s]*)?\)")


def pages() -> list[str]:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    site: dict[str, Any] = yaml.safe_load(text)
    assert site["strict"] and site["theme"]["font"] is False
    return [page for section in site["nav"] for group in section.values() for page in group]


def test_every_page_is_in_the_order_once() -> None:
    listed = pages()
    assert len(listed) == len(set(listed))
    assert set(listed) >= NOTEBOOKS and len(NOTEBOOKS) == 2
    assert set(listed) - GENERATED == {path.name for path in (ROOT / "docs").glob("*.md")} - GENERATED


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_links_lead_to_files(page: str) -> None:
    if page in GENERATED:
        return
    text = re.sub(
        r"^```.*?^```|`[^`\n]*`", "", (ROOT / "docs" / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    found = [link for link in LINK.findall(text) if link not in GENERATED]
    assert [link for link in found if not (ROOT / "docs" / link).exists()] == []


def test_the_api_page_names_what_exists() -> None:
    """Names are looked up in the sources: importing them would load torch."""
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    named = re.findall(r"^::: ([\w.]+)\n?(?: {4}options: \{members: \[([^\]]*)\]\})?", text, re.MULTILINE)
    assert len(named) > 8
    for path, members in named:
        file = ROOT / "src" / Path(*path.split(".")).with_suffix(".py")
        names = [each.strip() for each in members.split(",") if each.strip()]
        if not file.exists():
            file, names = ROOT / "src" / Path(*path.split(".")[:-1]).with_suffix(".py"), [path.split(".")[-1]]
        source = file.read_text(encoding="utf-8")
        assert [name for name in names if not re.search(rf"^(?:def|class) {name}\b", source, re.MULTILINE)] == [], path
