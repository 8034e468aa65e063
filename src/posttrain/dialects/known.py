"""The keys that a peer's own files hold, and messages about keys that they do not hold."""

from __future__ import annotations

from functools import cached_property

from posttrain.dialects.ledger import LATER, Key, Ledger
from posttrain.dialects.likeness import nearest_keys, one_slip, short_of
from posttrain.dialects.option_names import options_of
from posttrain.dialects.trees import parents
from posttrain.dialects.value_types import type_text
from posttrain.dialects.words import OUR_SECTION
from posttrain.errors import GUESS


class Known:
    """See overrides.KnownKeys.

    Args: ``ledger`` is that of the version and entry point that are read, ``every`` that of all versions and entry points;
        ``frees`` is for launches of a fork, whose file may hold what the peer's does not: it takes arguments that nothing here
        reads as the user's own keys (``is_free``), and known keys without the + that the peer's own file would need.
    """

    def __init__(self, ledger: Ledger, every: Ledger, *, frees: bool = False):
        self.frees = frees
        self.ledger = ledger
        self.every = every

    @property
    def peer(self) -> str:
        """The peer and the version of its table; the last one stands for all later ones, too."""
        version = self.ledger.version
        last = self.ledger.versions and version == self.ledger.versions[-1]
        later = " or later" if last and any(row.since == LATER for row in self.ledger.rows) else ""
        return f"{self.ledger.dialect} {version}{later}".strip()

    def has(self, key: str) -> bool:
        row = self.ledger.find(key)
        if row is not None:
            return row.in_a_file
        if key.split(".")[0] == OUR_SECTION:
            return True
        return self.ledger.is_section(key) or self.holds_anything_above(key) is not None

    def reports_later(self, key: str) -> bool:
        """Return True for a key that is set although the version's own file lacks it: one of no version, which is then reported
        with all others like it; with ``frees`` any known key."""
        row = self.ledger.find(key)
        if row is None:
            return not self.ledger.is_section(key)
        return self.frees and (self.is_free(row) or row.status != "refused")

    def is_free(self, row: Key) -> bool:
        """Return True for the arguments of the user's own code, under any name, that nothing here reads."""
        return row.free

    def holds_anything_above(self, key: str) -> Key | None:
        """The row above a key whose section takes names that the user chooses."""
        rows = (self.ledger.find(parent) for parent in parents(key))
        return next((row for row in rows if row is not None and "section" in type_text(row.type).split(" | ")), None)

    def absent(self, key: str, override: str) -> tuple[str, str]:
        row = self.ledger.find(key)
        if row is not None and row.status == "refused":
            return f"{key} is refused: {row.reason}", ""
        if row is not None:
            fix = f"a key that is not there yet needs a +: +{override}"
            guess = self._sibling(key) if row.name.endswith(".**") else ""
            return f"{key} is not in the own file of {self.peer}", f"{GUESS} {guess}? If not, {fix}" if guess else fix
        what, fix = f"there is no key {key} in {self.peer}", self.guess(key)
        return (what, f"{GUESS} {fix}?") if fix else (f"{what}{self.belongs(key)}", self.elsewhere(key))

    def slip(self, key: str, row: Key) -> str:
        """The known key that one below a section with any names may be a misspelling of; "" without one. The names are those
        of the table, and of the library that takes the section's values. A section of which neither knows any is compared with
        those that are called like it, unless it holds arguments of the user's own."""
        above = key.rpartition(".")[0]
        section = row.name.removesuffix(".**")
        names = [name for name in self.ledger.by_name if name.startswith(f"{section}.") and "*" not in name]
        names += [f"{above}.{option}" for option in options_of(above)]
        if not names and not section.endswith(("kwargs", "override_config")):
            last = above.rpartition(".")[2]
            sections = self._sections.items()
            alike = [leaves for other, leaves in sections if other.rpartition(".")[2] == last]
            alike = alike or [leaves for other, leaves in sections if other.count(".") == above.count(".")]
            names = [*dict.fromkeys(f"{above}.{leaf}" for leaves in alike for leaf in leaves)]
        if key in names:
            return ""
        slips = [name for name in names if one_slip(key, name)] or [name for name in names if short_of(key, name)]
        return next(iter(slips), "")

    def has_options(self, key: str) -> bool:
        """Return True for a key below a section whose names a library knows."""
        return bool(options_of(key.rpartition(".")[0]))

    def _sibling(self, key: str) -> str:
        """The known key of the same section that this one may be a misspelling of; "" without one."""
        section = key.rpartition(".")[0]
        return next(iter(nearest_keys(key, [f"{section}.{leaf}" for leaf in self._sections.get(section, ())])), "")

    @cached_property
    def _sections(self) -> dict[str, list[str]]:
        """The last names of the known keys of each section."""
        found: dict[str, list[str]] = {}
        for name in self.ledger.by_name:
            section, _, leaf = name.rpartition(".")
            if "*" not in name:
                found.setdefault(section, []).append(leaf)
        return found

    def guess(self, key: str) -> str:
        """The known key that this one may be a misspelling of; "" for one that means something else."""
        rows = [row for row in self._rows(key) if not row.name.endswith("**")]
        if rows:
            here = [name for name in self.ledger.by_name if name.endswith(f".{key}")]
            return here[0] if len(here) == 1 and not any(row.entry == self._entry for row in rows) else ""
        return self._in_another_section(key) or next(iter(self.ledger.nearest(key)), "")

    def _in_another_section(self, key: str) -> str:
        """The known key below a section whose name is misspelt in this one; "" without one."""
        for section in reversed(parents(key)):
            if self.ledger.is_section(section) or self.ledger.find(section) is not None:
                continue
            depth = section.count(".")
            alike = [name for name in self._all_sections if name.count(".") == depth]
            for guess in nearest_keys(section, alike, limit=2):
                meant = guess + key.removeprefix(section)
                if self.ledger.find(meant) or self.ledger.is_section(meant) or self.holds_anything_above(meant):
                    return meant
            return ""
        return ""

    @cached_property
    def _all_sections(self) -> list[str]:
        """Every name that has keys below it, also those whose keys the user names."""
        held = [
            row.name.removesuffix(".**") for row in self.ledger.rows if "section" in type_text(row.type).split(" | ")
        ]
        return sorted(name for name in {*self.ledger.sections, *held} if "*" not in name)

    def is_own(self, key: str) -> bool:
        """Return True when no version of the peer, and none of its entry points, has the key."""
        return not self._rows(key)

    def belongs(self, key: str) -> str:
        """End a sentence about a key that is not there: whose it is."""
        dialect = self.ledger.dialect
        rows = self._rows(key)
        if not rows:
            return f": it is yours, not {dialect}'s"
        there = next((row for row in rows if row.entry == self._entry), None)
        if there is None:
            return f": it is one of posttrain {rows[0].entry}"
        return f": it came {'after it' if there.since in ('', 'later') else f'with {dialect} {there.since}'}"

    def elsewhere(self, key: str) -> str:
        """The fix for a key of another version or entry point."""
        rows = self._rows(key)
        if not rows:
            return ""
        if not any(row.entry == self._entry for row in rows):
            return "remove it"
        version = next((row.since for row in rows if row.since in self.every.versions), self.every.versions[-1])
        return f"--dialect {self.ledger.dialect}@{version}"

    def _rows(self, key: str) -> list[Key]:
        return [row for row in self.every.finds(key) if row.name not in self.ledger.by_name]

    @property
    def _entry(self) -> str:
        return self.ledger.rows[0].entry
