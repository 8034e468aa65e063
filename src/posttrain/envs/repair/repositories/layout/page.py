"""Pages of justified text."""

from __future__ import annotations

from .wrapping import justify, wrap


def page(text: str, width: int) -> list[str]:
    """Wrap a text and justify every line but the last."""
    lines = wrap(text, width)
    return [line if number == len(lines) - 1 else justify(line.split(), width) for number, line in enumerate(lines)]


def columns(rows: list[list[str]]) -> list[str]:
    """Set a table: every column as wide as its longest cell, two spaces between columns, none at the end of a line."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    written = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        written.append("  ".join(cells).rstrip())
    return written


def shortened(text: str, width: int) -> str:
    """Cut a text to width characters, the last three of which are points where something was cut."""
    if len(text) <= width:
        return text
    return text[: width - 3] + "..."
