"""A hook of mkdocs: the start page is the README, and links to files outside docs/ become names.

The pages are read in the repository too, where such links lead to sources and examples; the site has no place for them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\[([^\]\n]+)\]\((\.\./[^)\s]+)\)")
TO_DOCS = re.compile(r"\]\(docs/")
OF_ROOT = re.compile(r"(?<!!)\[([^\]\n]+)\]\((?!https?:|#|docs/)([\w./-]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the README as the start page."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=TO_DOCS.sub("](", OF_ROOT.sub(r"\1", text))))
    return files


def on_page_markdown(markdown: str, **_about: Any) -> str:
    """Replace links to files outside docs/ by their texts."""
    return OUTSIDE.sub(r"\1", markdown)
