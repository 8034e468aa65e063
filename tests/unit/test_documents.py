"""Links of the documents lead somewhere, and the files that they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS += sorted((ROOT / "examples").rglob("*.md"))
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
# A path of the repository between backticks or in a command, with nothing in it that stands for something else.
PATH = re.compile(
    r"(?<![\w/.~-])((?:src|tests|benchmarks|examples|tools|docs)/[\w./-]+\.(?:py|yaml|sh|md|json|svg|toml))\b"
)
MADE = ("keys-roll.md", "keys-skyrl.md", "keys-verl.md")  # by `make docs`
PEERS = ("examples/data_preprocess/", "examples/start_")  # paths of other trainers' repositories
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """The names of its headings, as GitHub makes them."""
    text = CODE.sub("", document.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(document: Path) -> None:
    lost = []
    for target in LINK.findall(CODE.sub("", document.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        if file.name in MADE:
            continue
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            lost.append(target)
    assert lost == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_that_are_named_exist(document: Path) -> None:
    named = {path for path in PATH.findall(document.read_text(encoding="utf-8")) if not path.startswith(PEERS)}
    assert sorted(path for path in named if not (ROOT / path).exists() and Path(path).name not in MADE) == []


def test_a_lost_file_would_be_found() -> None:
    assert PATH.findall("see `src/posttrain/gone.py` and posttrain/envs/x.py") == ["src/posttrain/gone.py"]
    assert LINK.findall("[a](b.md#c) ![d](e.svg)") == ["b.md#c", "e.svg"]
    assert "two-commands" in anchors(ROOT / "README.md")
