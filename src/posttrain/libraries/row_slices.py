"""Slices of the rows of a data set, written behind its name as the library ``datasets`` writes them: ``train[200:240]``.

A bound is a row, counted from the end where it is negative, or a percentage (``[:10%]``), rounded to the closest row. Bounds
beyond the rows mean their end. Source: the documentation of ``datasets``, "Slice splits".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_SLICED = re.compile(r"(?P<name>.+)\[\s*(?P<first>-?[\d_]+%?)?\s*:\s*(?P<last>-?[\d_]+%?)?\s*\]")


@dataclass(frozen=True, slots=True)
class RowSlice:
    """The rows from ``first`` up to before ``last``; None: from the start, up to the end."""

    first: int | None = None
    last: int | None = None
    percent: bool = False

    def of(self, rows: int) -> range:
        """The numbers of the rows that are meant, of ``rows`` in all."""
        first = 0 if self.first is None else self._row(self.first, rows)
        return range(first, max(first, rows if self.last is None else self._row(self.last, rows)))

    @property
    def needs_count(self) -> bool:
        """True where the rows have to be counted to know which are meant."""
        return self.percent or any(bound is not None and bound < 0 for bound in (self.first, self.last))

    def __str__(self) -> str:
        unit = "%" if self.percent else ""
        first, last = ("" if bound is None else f"{bound}{unit}" for bound in (self.first, self.last))
        return f"[{first}:{last}]"

    def _row(self, bound: int, rows: int) -> int:
        if self.percent:
            bound = round(bound * rows / 100.0)
        return min(max(rows + bound, 0) if bound < 0 else bound, rows)


def split_slice(text: str) -> tuple[str, RowSlice | None]:
    """Split a name with a slice behind it. Returns: the name, and the slice; None without one, or where it cannot be one.

    One bound in percent makes both percentages, as in ``datasets``, whose percentages lie between -100 and 100.
    """
    found = _SLICED.fullmatch(text)
    if found is None:
        return text, None
    bounds = [found["first"], found["last"]]
    percent = any(bound is not None and bound.endswith("%") for bound in bounds)
    try:
        first, last = (None if bound is None else int(bound.rstrip("%")) for bound in bounds)
    except ValueError:
        return text, None
    if percent and any(bound is not None and abs(bound) > 100 for bound in (first, last)):
        return text, None
    return found["name"], RowSlice(first, last, percent)
