"""What holds for the table of every dialect."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.config.reading import keys
from posttrain.dialects.detect import NAMES, load_dialect
from posttrain.dialects.entries import ENTRIES
from posttrain.dialects.explain import page
from posttrain.dialects.ledger import ABSENT, Ledger, fits

DOCS = Path(__file__).parents[3] / "docs"
PEERS = sorted({name.partition("@")[0] for name in NAMES} - {"native"})


@pytest.fixture(scope="module", params=PEERS)
def ledger(request: pytest.FixtureRequest) -> Ledger:
    found: Ledger = load_dialect(request.param).ledger
    return found


def test_the_page_in_docs_is_the_table(ledger: Ledger) -> None:
    file = DOCS / f"keys-{ledger.dialect}.md"
    assert file.read_text(encoding="utf-8") == page(ledger), (
        f"stale: posttrain keys {ledger.dialect} --markdown > docs/{file.name}"
    )


def test_every_row_says_what_it_must(ledger: Ledger) -> None:
    for row in ledger.rows:
        assert row.meaning, row.name
        assert "\n" not in row.meaning and len(row.meaning) < 250, row.name
        if row.status == "mapped":
            assert row.fields and not row.reason, row.name
        else:
            assert row.reason and not row.fields, row.name


def test_mapped_rows_name_fields_that_exist(ledger: Ledger) -> None:
    """A field may end below one that holds a section of the engine's own words."""
    for row in ledger.rows:
        ours = keys.known_keys(ENTRIES[row.entry].root) if row.fields else {}
        for field in row.fields:
            pattern = keys.pattern(field, ENTRIES[row.entry].root)
            parents = [pattern, *(pattern.rsplit(".", cut)[0] for cut in range(1, pattern.count(".") + 1))]
            open_ended = any(word in field for word in ("engine_", "options", "overrides", "settings"))
            known = [parent for parent in parents[: None if open_ended else 1] if parent in ours]
            assert known, (row.name, field)


def test_defaults_have_the_type_of_their_row(ledger: Ledger) -> None:
    for row in ledger.rows:
        for value in (row.default, *row.earlier.values()):
            refers = isinstance(value, str) and "${" in value
            assert value is ABSENT or refers or fits(value, row.type), (row.name, value, row.type)


def test_every_version_can_be_read(ledger: Ledger) -> None:
    for version in ledger.versions:
        assert ledger.at(version).defaults()
