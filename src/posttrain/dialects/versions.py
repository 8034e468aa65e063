"""The version of a peer that a configuration was written for, found by its keys."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.config.reading.overrides import Assignment
from posttrain.dialects.ledger import ABSENT, Key, Ledger

MOST_NAMED = 3  # keys that a message names
CHECKOUT = Path("verl/version/version")  # of a checkout of verl, or of a fork


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundVersion:
    """A version that fits better than the table's own, and the keys that show it."""

    version: str
    keys: tuple[str, ...]
    checkout: str = ""  # what the checkout in the current folder says of itself, where the keys fit several versions

    def said(self, dialect: str, usual: str) -> str:
        if self.checkout:
            other = f"--dialect {dialect}@{usual} reads it as that"
            return f"read as {dialect} {self.version}: {CHECKOUT} says {self.checkout}; {other}"
        shown = ", ".join(self.keys[:MOST_NAMED])
        more = f" and {len(self.keys) - MOST_NAMED} more" if len(self.keys) > MOST_NAMED else ""
        fit = "does" if len(self.keys) == 1 else "do"
        return (
            f"read as {dialect} {self.version}: {shown}{more} {fit} not fit {dialect} {usual}; "
            f"--dialect {dialect}@{usual} reads it as that"
        )


def find_version(ledger: Ledger, written: Mapping[str, Any], overrides: Sequence[Assignment]) -> FoundVersion | None:
    """The version with the fewest keys that do not fit it; None where the table's own is one of them.

    A key does not fit a version that lacks it; nor does an override with + of a key that the version's own file holds, or one
    without + of a key that it does not hold. Keys that no version has are the user's, and count nowhere. Of versions that
    fit alike, the one is taken that a checkout of verl in the current folder names, then the table's own, then the one whose
    own values the file holds most of, then the latest.

    Args: ``ledger`` is of the entry point that is read; ``written`` are the keys and values of the user's file.
    """
    file = {key: value for key, value in written.items() if ledger.find(key) is not None}
    tables = {version: ledger.at(version) for version in ledger.versions}
    misfits = {version: _misfits(table, version, file, overrides, ledger) for version, table in tables.items()}
    least = min((len(keys) for keys in misfits.values()), default=0)
    said = _checkout() if ledger.dialect == "verl" else ""
    number = _number(said)
    if number != ledger.version and misfits.get(number) == []:
        return FoundVersion(version=number, keys=(), checkout=said)
    if ledger.version not in misfits or len(misfits[ledger.version]) == least:
        return None
    best = [version for version, keys in misfits.items() if len(keys) == least]
    version = max(best, key=lambda one: (_own_values(tables[one], file), ledger.versions.index(one)))
    fits = set(misfits[version])
    return FoundVersion(version=version, keys=tuple(key for key in misfits[ledger.version] if key not in fits))


def checkout_version() -> str:
    """The version of verl, such as 0.2, of the checkout in the current folder; "" outside of one."""
    return _number(_checkout())


def _number(said: str) -> str:
    return ".".join(said.split(".")[:2])


def _checkout() -> str:
    """The version of the checkout in the current folder; "" outside of one."""
    try:
        return CHECKOUT.read_text(encoding="utf-8", errors="replace").strip()[:40]
    except OSError:
        return ""


def _misfits(
    table: Ledger, version: str, file: Collection[str], overrides: Sequence[Assignment], ledger: Ledger
) -> list[str]:
    """The keys that do not fit a version."""
    place = ledger.versions.index(version)

    def is_over(row: Key) -> bool:
        return bool(row.until) and ledger.versions.index(row.until) < place

    found = []
    for key in file:
        row = table.find(key)
        if row is None or is_over(row):
            found.append(key)
    for one in overrides:
        if ledger.find(one.key) is None or one.key in file:
            continue
        row = table.find(one.key)
        held = row is not None and row.in_a_file
        if (
            row is None
            or (one.action == "set" and not held and not _is_open(row))
            or (one.action == "add" and _is_there(row))
        ):
            found.append(one.key)
    return found


def _is_open(row: Key) -> bool:
    """True for a section that takes any name."""
    return "*" in row.name


def _is_there(row: Key) -> bool:
    """True when + is an error: the version's own file holds the key with a value that is no section."""
    return row.default is not ABSENT and row.default is not None and not isinstance(row.default, dict | list)


def _own_values(table: Ledger, written: Mapping[str, Any]) -> int:
    """Count the keys that the file holds as the version's own does."""
    return sum(row.default == written[row.name] for row in table.rows if row.name in written)
