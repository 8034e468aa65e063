"""A hook of mkdocs: the notebooks of examples/notebooks as pages, with their outputs.

A notebook is JSON, so a page is made of its cells here; mkdocs-jupyter and nbconvert bring thirty packages for the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
TO_NOTEBOOK = re.compile(r"\]\((?:\.\./examples/notebooks/|examples/notebooks/)?(\w+)\.ipynb\)")
TO_DOCS = re.compile(r"\]\(\.\./\.\./docs/")


def on_files(files: Files, config: Any) -> Files:
    """Add a page per notebook."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        files.append(File.generated(config, f"notebook-{path.stem}.md", content=page_of(path)))
    return files


def on_page_markdown(markdown: str, **_about: Any) -> str:
    """Lead links to notebooks to their pages."""
    return TO_NOTEBOOK.sub(r"](notebook-\1.md)", markdown)


def page_of(path: Path) -> str:
    """Return a notebook as Markdown: its texts, its code, and the text of its outputs."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "\n\n".join(part for cell in cells for part in _parts(cell))
    return TO_DOCS.sub("](", text) + f"\n\nThe notebook is `examples/notebooks/{path.name}`.\n"


def _parts(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"````python\n{source}\n````"
    shown = "\n".join("".join(_text(output)).rstrip("\n") for output in cell["outputs"])
    if shown:
        yield f"````text\n{shown}\n````"


def _text(output: dict[str, Any]) -> list[str]:
    found: list[str] = output.get("text") or output.get("data", {}).get("text/plain", [])
    return found
