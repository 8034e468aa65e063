"""What holds for the table of every dialect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from posttrain.dialects.detect import NAMES, load_dialect
from posttrain.dialects.entries import ENTRIES
from posttrain.dialects.explain import page
from posttrain.dialects.ledger import Ledger

from .examples import PEERS as PEERS_WITH_TABLES

ROOT = Path(__file__).parents[3]
PEERS = sorted({name.partition("@")[0] for name in NAMES} - {"native"})


@pytest.fixture(scope="module", params=PEERS)
def ledger(request: pytest.FixtureRequest) -> Ledger:
    found: Ledger = load_dialect(request.param).ledger
    return found


def test_the_page_of_a_dialect_has_a_line_for_every_key(ledger: Ledger) -> None:
    lines = [line for line in page(ledger).splitlines() if line.startswith("| `")]
    assert len(lines) == len(ledger.rows)
    assert all(len(re.split(r"(?<!\\)\|", line)) == 7 for line in lines)  # five cells and both ends
    for row in ledger.rows:
        assert any(line.startswith(f"| `{row.name}`") for line in lines), row.name


def test_make_docs_writes_a_page_for_every_dialect() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    [dialects] = re.findall(r"for dialect in (.*?); do", makefile)
    assert sorted(dialects.split()) == ["native", *PEERS]
    [entries] = re.findall(r"for entry in (.*?); do", makefile)
    assert {"train", *entries.split()} == set(ENTRIES)
    assert "/docs/keys-*.md" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


def test_every_peer_has_tables() -> None:
    assert list(PEERS_WITH_TABLES) == PEERS


def test_every_version_can_be_read(ledger: Ledger) -> None:
    for version in ledger.versions:
        assert ledger.at(version).defaults()
