"""The standard layout of the tables of keys: `make format` rewrites every table in it, so that one change is one line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

# The columns of a row, in their order; those of a group share a line.
LINES: tuple[tuple[str, ...], ...] = (
    ("use", "as", "section", "role", "devices", "with"),
    ("key", "same_as", "entry", "only", "type", "default", "earlier", "since", "until", "released", "free"),
    ("about",),
    ("meaning",),
    ("for", "field", "rule", "convert"),
    ("ignored",),
    ("refused",),
    ("planned",),
    ("off", "cluster", "engine"),
    ("otherwise",),
    ("except",),
    ("change",),
    ("instead",),
    ("note",),
    ("example", "given", "expected"),
    ("because",),
    ("only_value",),
    ("no_example",),
)
# Columns whose parts stand on lines of their own.
BLOCKS = ("further", "in")
COLUMNS = (*(column for line in LINES for column in line), *BLOCKS)


def layout(items: Iterable[dict[str, Any]]) -> str:
    """A table as text."""
    return "[\n" + ",\n".join(f"{{{_item(item)}}}" for item in items) + "\n]\n"


def _item(item: dict[str, Any]) -> str:
    lines = [
        ", ".join(f"{_text(column)}: {_text(item[column])}" for column in group if column in item) for group in LINES
    ]
    unknown = {column: value for column, value in item.items() if column not in COLUMNS}
    lines += [f"{_text(column)}: {_text(value)}" for column, value in unknown.items()]
    lines += [f"{_text(column)}: {_block(item[column])}" for column in BLOCKS if column in item]
    return ",\n ".join(line for line in lines if line)


def _block(value: Any) -> str:
    """A list with one item per line, or a mapping with one entry per line."""
    if isinstance(value, dict):
        return "{\n  " + ",\n  ".join(f"{_text(name)}: {_text(one)}" for name, one in value.items()) + "\n }"
    return "[\n  " + ",\n  ".join(_text(one) for one in value) + "\n ]"


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def table_files() -> Iterator[Path]:
    """Every table and template of every dialect."""
    yield from sorted(Path(__file__).parent.glob("*/keys/**/*.json"))


def main() -> None:
    """Rewrite every table that is not in the standard layout, and name it."""
    for file in table_files():
        text = file.read_text(encoding="utf-8")
        wanted = layout(json.loads(text))
        if text != wanted:
            file.write_text(wanted, encoding="utf-8")
            print(f"laid out {file}")


if __name__ == "__main__":
    main()
