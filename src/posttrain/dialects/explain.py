"""A ledger for people: the rows of ``posttrain keys``, and the page that ``make docs`` writes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from posttrain.dialects.ledger import ABSENT, Key, Ledger
from posttrain.dialects.value_types import type_text

ENTRIES = {
    "train": "Reinforcement learning (`posttrain train`)",
    "sft": "Supervised fine-tuning (`posttrain sft`)",
    "tune": "Preferences and reward models (`posttrain tune`)",
    "generate": "Generation (`posttrain generate`)",
    "evaluate": "Evaluation (`posttrain evaluate`)",
    "serve": "Serving (`posttrain serve`)",
}
STATUSES = ("mapped", "ignored", "planned", "refused")


def key_row(row: Key) -> dict[str, Any]:
    """All columns of a row, for JSON."""
    return {
        "key": row.name,
        "type": type_text(row.type),
        "default": None if row.default is ABSENT else row.default,
        "field": ", ".join(row.fields),
        "status": row.status,
        "reason": row.reason,
        "meaning": row.meaning,
        "change": row.change,
        "note": row.note,
        "since": row.since,
        "earlier": {version: None if value is ABSENT else value for version, value in row.earlier.items()},
        "entry": row.entry,
    }


def default_text(row: Key) -> str:
    """The default as it would be written; - for a key that is not there until someone writes it."""
    return "-" if row.default is ABSENT else _value_text(row.default)


def _value_text(value: Any) -> str:
    match value:
        case None:
            return "null"
        case True | False:
            return str(value).lower()
        case list():
            return f"[{', '.join(_value_text(item) for item in value)}]"
        case dict():
            return f"{{{', '.join(f'{name}: {_value_text(item)}' for name, item in value.items())}}}"
        case "":
            return "''"
        case _:
            return str(value)


def in_order(rows: Iterable[Key]) -> list[Key]:
    """The rows entry point by entry point."""
    return sorted(rows, key=lambda row: list(ENTRIES).index(row.entry))


def listed(rows: Sequence[Key]) -> str:
    """One line per key under the title of its entry point: where it goes, unless it is a field of ours, and its meaning."""
    width = max(len(row.name) for row in rows)
    lines: list[str] = []
    for entry, of_entry in groupby(in_order(rows), key=lambda row: row.entry):
        if lines or entry != "train":
            lines += [*([""] if lines else []), f"{ENTRIES[entry]}:"]
        for row in of_entry:
            here = "" if row.fields == (row.name,) else f"{_short(row)}: "
            lines.append(f"{row.name:<{width}}  {here}{row.meaning}")
    return "\n".join(lines)


def _short(row: Key) -> str:
    return f"-> {', '.join(row.fields)}" if row.status == "mapped" else f"{row.status} ({row.reason})"


def became(row: Key) -> str:
    """One line: the fields that a key decides, or the reason why it decides none."""
    if row.status != "mapped":
        return f"{row.status}: {row.reason}"
    return ", ".join(row.fields) + (f" ({row.change})" if row.change else "")


def explained(rows: Iterable[Key], dialect: str) -> str:
    """Each key with all there is to say about it; entry points where it is the same share one text."""
    texts: dict[str, list[Key]] = {}
    for row in in_order(rows):
        texts.setdefault(str(key_row(row) | {"entry": ""}), []).append(row)
    return "\n\n".join(_explained(same[0], [row.entry for row in same], dialect) for same in texts.values())


def _explained(row: Key, entries: Sequence[str], dialect: str) -> str:
    lines = [
        row.name,
        f"  {row.meaning}",
        *([f"  entry     posttrain {', '.join(entries)}"] if entries != ["train"] else []),
        f"  type      {type_text(row.type)}",
        f"  default   {default_text(row)}",
    ]
    lines += [
        f"  {f'in {version}':<9} {'absent' if value is ABSENT else _value_text(value)}"
        for version, value in row.earlier.items()
    ]
    if row.since:
        lines.append(
            f"  since     {'a version after the documented ones' if row.since == 'later' else f'{dialect} {row.since}'}"
        )
    if row.until:
        lines.append(f"  until     {dialect} {row.until}")
    lines.append(f"  here      {became(row)}")
    if row.note:
        lines.append(f"  note      {row.note}")
    return "\n".join(lines)


def page(ledger: Ledger) -> str:
    """The dialect's page in docs: every key in a table, grouped by its first names."""
    counts = {status: sum(row.status == status for row in ledger.rows) for status in STATUSES}
    shares = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    lines = [
        f"# Every key of {ledger.dialect}",
        "",
        f"Made by `make docs` from what `posttrain keys {ledger.dialect}` knows; {len(ledger.rows)} keys: {shares}.",
        "",
        "*mapped*: it does here what it does there, through the field named. *ignored*: it has no effect here, for the "
        "reason given. *planned*: not built yet; `posttrain plan` reports it and a run is refused. *refused*: it cannot be "
        "honoured. "
        "`*` stands for one name, `**` for everything below.",
    ]
    for entry, title in ENTRIES.items():
        rows = ledger.of(entry).rows
        if not rows:
            continue
        lines += ["", f"## {title}"]
        group = None
        for row in rows:
            section = _section(row.name)
            if section != group:
                lines += [
                    "",
                    f"### `{section}`" if section else "### Top level",
                    "",
                    "| key | type | default | here | meaning |",
                    "|---|---|---|---|---|",
                ]
                group = section
            lines.append(f"| {' | '.join(_cells(row))} |")
    return "\n".join(lines) + "\n"


def _section(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[: min(2, len(parts) - 1)])


def _cells(row: Key) -> list[str]:
    default = f"`{default_text(row)}`" if row.default is not ABSENT else "-"
    default += "".join(
        f", {version}: {'absent' if value is ABSENT else f'`{_value_text(value)}`'}"
        for version, value in row.earlier.items()
    )
    meaning = row.meaning + (f" Note: {row.note}" if row.note else "")
    since = f" (since {row.since})" if row.since and row.since != "later" else " (later versions)" if row.since else ""
    cells = [f"`{row.name}`{since}", type_text(row.type), default, _prose(became(row)), _prose(meaning)]
    return [cell.replace("|", "\\|").replace("\n", " ") for cell in cells]


def _prose(text: str) -> str:
    """Write <image> and the like so that a page shows them, and takes them for no tags."""
    return re.sub(r"`[^`]*`|<", lambda found: "&lt;" if found[0] == "<" else found[0], text)
