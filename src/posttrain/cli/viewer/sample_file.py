"""A file of samples with random access: opening it only searches for line ends, and lines are parsed on access."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from posttrain.libraries import json_text

ROWS_KEPT = 512  # parsed rows in the cache, so that redrawing a screen parses nothing


class SampleFile(Sequence[dict[str, Any]]):
    """The samples of a step or of a validation. A line that is no JSON object (incomplete or damaged) becomes a row whose
    ``damaged`` holds its text, cut. The file is memory-mapped: when it is replaced, the opened version stays readable."""

    def __init__(self, path: Path):
        with path.open("rb") as file:
            empty = path.stat().st_size == 0
            self._data: mmap.mmap | bytes = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._starts = _line_starts(self._data)
        self._row = lru_cache(maxsize=ROWS_KEPT)(self._parse)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return self._row(range(len(self))[index])

    def parse(self, index: int) -> dict[str, Any]:
        """Parse a row without caching it, for a pass over the whole file."""
        return self._parse(index)

    def _parse(self, index: int) -> dict[str, Any]:
        start = self._starts[index]
        end = self._starts[index + 1] if index + 1 < len(self) else len(self._data)
        line = self._data[start:end].decode("utf-8", "replace")
        try:
            row = json_text.loads(line)
        except (ValueError, RecursionError):
            row = None
        return row if isinstance(row, dict) else {"damaged": line.rstrip("\n")[:1000]}


def _line_starts(data: mmap.mmap | bytes) -> list[int]:
    """Return the offsets of the lines that are not empty."""
    starts, start = [], 0
    while start < len(data):
        end = data.find(b"\n", start)
        end = len(data) if end < 0 else end
        if end > start:
            starts.append(start)
        start = end + 1
    return starts
