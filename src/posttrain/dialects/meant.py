"""Problems at the keys that the user has to change: the key that was meant by a misspelt one, and the one that holds a value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from posttrain.dialects.known import Known
from posttrain.dialects.ledger import Key
from posttrain.dialects.own_keys import Own, looks_misspelt
from posttrain.dialects.reader import Reader
from posttrain.dialects.trees import NOTHING, value_at
from posttrain.dialects.value_types import fits
from posttrain.errors import GUESS, Problem


def let_its_value_stand(reader: Reader, known: Known, own: Own) -> None:
    """Let rules read a refused misspelling as the key that was meant, so that nothing more is reported for its default's sake."""
    meant = known.guess(own.key)
    section_alone = meant.count(".") == own.key.count(".") and meant.rpartition(".")[2] == own.key.rpartition(".")[2]
    row = reader.ledger.find(meant) if meant and (section_alone or looks_misspelt(own.key, meant)) else None
    if row is None or row.status != "mapped" or not fits(own.value, row.type):
        return
    _stand(reader, meant, row, own.value)


def let_slips_stand(reader: Reader) -> None:
    """Let rules read misspelt keys that are no errors in their dialect as the keys that were meant."""
    for slip in reader.slips:
        value, meant = value_at(reader.values, slip.field), slip.fix.removeprefix(GUESS).strip(" ?")
        row = reader.ledger.find(meant)
        if value is NOTHING or row is None or row.status != "mapped" or not fits(value, row.type):
            continue
        reader.remove(slip.field)
        _stand(reader, meant, row, value)


def _stand(reader: Reader, key: str, row: Key, value: Any) -> None:
    # Rules read a setting with two names under the earlier one, unless the later one is written
    for name in (key, row.same_as):
        there = reader.written(name) and value_at(reader.values, name) is not NOTHING
        if name and reader.ledger.find(name) is not None and not there:
            reader.put(name, value)


def at_their_holders(problems: Iterable[Problem], reader: Reader, holders: Mapping[str, str]) -> list[Problem]:
    """Report the problem of a value where it is written, at the key that others refer to with ${...}, and once for all."""
    found: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        holder, key = holders.get(problem.field, ""), problem.field
        if holder and reader.ledger.find(holder) is not None and not problem.refused:
            what, fix = (text.replace(key, holder) for text in (problem.what, problem.fix))
            problem = replace(problem, what=what, fix=fix, where=reader.sources.where(holder), field=holder)
        # A wrong type is said once, although one of the keys may take more than another
        said = "type" if problem.what.startswith(f"{problem.field} must be ") else problem.what
        found.setdefault((problem.field, said), problem)
    return list(found.values())
