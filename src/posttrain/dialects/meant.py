"""Misspelt keys of the user's, whose values are read as those of the keys that were meant."""

from __future__ import annotations

from posttrain.dialects.known import Known
from posttrain.dialects.own_keys import Own, looks_misspelt
from posttrain.dialects.reader import Reader
from posttrain.dialects.value_types import fits


def let_its_value_stand(reader: Reader, known: Known, own: Own) -> None:
    """Let rules read a refused misspelling as the key that was meant, so that nothing more is reported for its default's sake."""
    meant = known.guess(own.key)
    section_alone = meant.count(".") == own.key.count(".") and meant.rpartition(".")[2] == own.key.rpartition(".")[2]
    row = reader.ledger.find(meant) if meant and (section_alone or looks_misspelt(own.key, meant)) else None
    if row is None or row.status != "mapped" or not fits(own.value, row.type):
        return
    # Rules read a setting with two names under the earlier one, unless the later one is written
    for name in (meant, row.same_as):
        if name and reader.ledger.find(name) is not None and not reader.written(name):
            reader.put(name, own.value)
