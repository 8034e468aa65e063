"""A hook of mkdocs: names in tables break at their dots and underscores, and tables of sentences become lists on a phone.

The theme breaks code in narrow columns anywhere, so that `model.path` became `model.pat` and `h`. docs/site.css holds the rest.
"""

from __future__ import annotations

import re
from typing import Any

TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
CELL = re.compile(r"<(t[hd])([^>]*)>(.*?)</\1>", re.DOTALL)
CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
TAG = re.compile(r"<[^>]+>")
# Behind these a name may break: not within entities such as &lt;, which have none of them
BREAKS = re.compile(r"(?<=[._/=,])(?=\w)")
SENTENCE = 60  # characters of a cell from which on a table is one of sentences


def on_page_content(html: str, **_about: Any) -> str:
    """Prepare the tables of a page."""
    return TABLE.sub(lambda found: prepared(found[0]), html)


def prepared(table: str) -> str:
    """Add places to break to names, and to a table of sentences the class ``stacked`` and its columns' names to its cells."""
    table = CODE.sub(lambda name: BREAKS.sub("<wbr>", name[0]), table)
    heads = [TAG.sub("", cell[3]).strip() for cell in CELL.finditer(table) if cell[1] == "th"]
    longest = max((len(TAG.sub("", cell[3])) for cell in CELL.finditer(table) if cell[1] == "td"), default=0)
    if longest < SENTENCE:
        return table
    return ROW.sub(lambda row: _labelled(row[0], heads), table).replace("<table>", '<table class="stacked">', 1)


def _labelled(row: str, heads: list[str]) -> str:
    labels = iter(heads)

    def label(cell: re.Match[str]) -> str:
        name = next(labels, "")
        return f'<td{cell[2]} data-label="{name}">{cell[3]}</td>' if cell[1] == "td" and name else cell[0]

    return CELL.sub(label, row)
