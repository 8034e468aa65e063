"""The code blocks of README.md, CONTRIBUTING.md and docs/*.md, and the marks that say how a test runs them.

A mark is a comment on the lines before a block, which no reader of the page sees: ``<!-- block: KEY: VALUE | KEY: VALUE -->``.

* ``not run: WHY`` for a block that needs what a test has not (a cluster, a GPU, the hub, somebody who looks at a screen)
* ``entry: sft`` for a YAML block that another command than `posttrain train` reads, ``inside: reward.terms`` for part of a file
* ``file: NAME`` keeps the block as a file, which later blocks of the page name
* ``printed by: COMMAND`` for a text block that shows what a quick command prints, whatever the width of the terminal
* ``with: NAME`` writes what the command looks at before it, by a function of tests/unit/test_document_blocks.py
* ``not printed: WHY`` for a text block that no command prints, such as a drawing, or prints otherwise elsewhere; a synopsis, with
  ``…`` or ``[--`` in it, needs no mark
* ``slow: WHY`` runs a Python block in the slow part; commands go there by themselves

Of the tools on PyPI, mktestdocs and pytest-codeblocks run Python and shell only, and sybil reads no marks beside a block; this
is markdown-it-py, which rich brings along, and a page of code.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += [page for page in sorted((ROOT / "docs").glob("*.md")) if not page.name.startswith(("keys-", "index."))]
LANGUAGES = ("bash", "python", "yaml", "json", "csv", "text", "dockerfile")
KEYS = ("not run", "entry", "inside", "file", "printed by", "with", "not printed", "slow")
MARK = re.compile(r"<!-- block: (.*?) -->", re.DOTALL)
# Commands that need no model and are over at once.
QUICK = ("plan", "keys", "translate", "init", "schema", "data")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block. ``marks`` holds the values of its mark by key."""

    page: Path
    line: int
    language: str
    text: str
    marks: dict[str, str]

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        return "not run" not in self.marks

    @property
    def commands(self) -> list[list[str]]:
        """The words of every command of a bash block, without comments; a backslash continues a line."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]

    @property
    def quick(self) -> bool:
        if self.language == "bash":
            return all(
                words[0] == "posttrain" and words[1] in QUICK and "reasoning-gym" not in words
                for words in self.commands
            )
        return "slow" not in self.marks


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page. Raises: ValueError for an indented block, or a mark that says nothing."""
    marks: dict[str, str] = {}
    for token in MarkdownIt("commonmark").parse(page.read_text(encoding="utf-8")):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "html_block":
            marks = _marks(token.content, f"{page.name}:{line}")
        elif token.type == "fence":
            yield Block(page=page, line=line, language=token.info.strip(), text=token.content, marks=marks)
            marks = {}
        elif token.type == "code_block":
            raise ValueError(f"{page.name}:{line}: a block is fenced, and names its language")
        elif marks:
            raise ValueError(f"{page.name}:{line}: a mark stands before a block")


def _marks(comment: str, place: str) -> dict[str, str]:
    found = MARK.search(comment)
    if found is None:
        return {}
    marks = {key.strip(): value.strip() for key, _, value in (part.partition(":") for part in found[1].split("|"))}
    if unknown := marks.keys() - set(KEYS):
        raise ValueError(f"{place}: no test knows the mark {sorted(unknown)}")
    for reason in ("not run", "not printed"):
        if reason in marks and len(marks[reason].split()) < 2 + (reason == "not run"):
            raise ValueError(f"{place}: say why the block is {reason}")
    return marks


def all_blocks() -> list[Block]:
    return [block for page in PAGES if page.name != "api.md" for block in blocks(page)]
