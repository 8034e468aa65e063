"""What the tables of keys must keep to, checked row by row: every complaint names its file and line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.config.base import Section
from posttrain.config.reading.keys import known_keys, pattern
from posttrain.config.reading.sources import same_branch
from posttrain.dialects.converters import converter
from posttrain.dialects.entries import ENTRIES
from posttrain.dialects.layout import layout
from posttrain.dialects.ledger import ABSENT
from posttrain.dialects.tables import EXAMPLES, HANDLING, IF_USED, STATUSES, Row, Tables, default_of, fill_in
from posttrain.dialects.value_types import fits, parse_type, type_text

OF_A_ROW = {
    "key",
    "entry",
    "only",
    "type",
    "default",
    "earlier",
    "since",
    "released",
    "free",
    "until",
    "meaning",
    "for",
    "engine",
    "note",
    "in",
}
OF_A_ROW |= {*STATUSES, *HANDLING, *EXAMPLES}
OF_AN_ALIAS = {"key", "same_as", "since", "earlier", *EXAMPLES}
OF_A_CASE = {"example", "given", "expected"}
OF_A_USE = {"use", "as", "with", "except", "otherwise", "ignored", "given"}
LONGEST_MEANING = 250


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a table, and where it stands."""

    file: Path
    line: int
    value: Row

    def complain(self, text: str) -> str:
        name = self.value.get("key") or self.value.get("use") or "an item"
        return f"{_shown(self.file)}:{self.line} {name}: {text}"


def _shown(file: Path) -> str:
    return "/".join(file.parts[-3:])


def items(file: Path) -> list[Item]:
    """The items of a table with their lines.

    Raises: ValueError where the file is not a list of objects.
    """
    text, decoder, found = file.read_text(encoding="utf-8"), json.JSONDecoder(), []

    def line(place: int) -> int:
        return text.count("\n", 0, place) + 1

    place = text.index("[") + 1
    while match := re.compile(r"[\s,]*(?=\{)").match(text, place):
        try:
            value, place = decoder.raw_decode(text, match.end())
        except json.JSONDecodeError as error:
            raise ValueError(f"{file.name}:{error.lineno} is not JSON: {error.msg}") from error
        found.append(Item(file, line(match.end()), value))
    if text[place:].strip() != "]":
        raise ValueError(f"{file.name}:{line(place)} is not JSON: an object or the end of the list is missing")
    return found


def complaints(tables: Tables) -> list[str]:
    """Everything that is wrong with the tables of a dialect; empty when nothing is."""
    try:
        found = [complaint for name in tables.names for complaint in _table(tables, name)]
    except ValueError as error:
        return [str(error)]
    lost = sorted({file.stem for file in tables.folder.glob("*.json")} - {*tables.names})
    found += [f"{name}.json: no such table is named in ledger.py" for name in lost]
    return found + _twice(tables)


def _table(tables: Tables, name: str) -> Iterator[str]:
    file = tables.folder / f"{name}.json"
    contexts = json.loads((tables.folder.parent / "contexts.json").read_text(encoding="utf-8"))
    known = {*contexts["bases"], *contexts["contexts"]}
    versions = {*tables.versions, tables.version, "later"} | ({"2025-05"} if tables.dialect == "roll" else set())
    found = items(file)
    yield from _laid_out(file)
    for item in found:
        if "about" in item.value:
            continue
        if "use" not in item.value:
            yield from _row(item, item.value, known, versions)
            continue
        template = tables.folder / "templates" / f"{item.value['use']}.json"
        if not template.exists():
            yield item.complain(f"there is no template {item.value['use']}")
            continue
        yield from _use(item, template)
        for row in items(template):
            for filled in fill_in(item.value, [row.value]):
                yield from _row(Item(row.file, row.line, filled), filled, known, versions)


def _laid_out(file: Path) -> Iterator[str]:
    text = file.read_text(encoding="utf-8")
    wanted = layout(json.loads(text)).splitlines()
    for line, (is_, should) in enumerate(zip([*text.splitlines(), ""], [*wanted, ""], strict=False), start=1):
        if is_ != should:
            yield f"{_shown(file)}:{line} is not in the standard layout: run make format"
            return


def _use(item: Item, template: Path) -> Iterator[str]:
    use = item.value
    yield from _laid_out(template)
    texts = {f"<{name}>" for name, text in use.items() if isinstance(text, str)}
    unknown = {name for name in use if name not in OF_A_USE and not isinstance(use[name], str)}
    if unknown:
        yield item.complain(f"unknown columns: {', '.join(sorted(unknown))}")
    rows = [row for row in items(template) if "key" in row.value]
    for key in use.get("except", ()):
        if key not in [row.value["key"] for row in rows]:
            yield item.complain(f"except names {key}, which {template.name} does not have")
    for row in rows:
        roles = {role for names in (*row.value.get("in", ()),) for role in names.split()}
        mine = use["as"] in row.value.get("only", [use["as"]]) and row.value["key"] not in use.get("except", ())
        yield from (
            row.complain(f"unknown column {column}") for column in row.value if column not in (*OF_A_ROW, *OF_AN_ALIAS)
        )
        if mine and use["as"] in roles | {*row.value.get("for", [use["as"]])}:
            left = set(re.findall(r"<[a-z_]+>", json.dumps([row.value["key"], row.value.get("field", "")]))) - texts
            if left and "ignored" not in use:
                yield item.complain(f"{', '.join(sorted(left))} of {row.value['key']} is not given")


def _row(item: Item, row: Row, contexts: set[str], versions: set[str]) -> Iterator[str]:
    """What is wrong with one row, templates filled in."""
    say = item.complain
    yield from (say(f"unknown column {column}") for column in row if column not in (*OF_A_ROW, *OF_AN_ALIAS))
    if "same_as" in row:
        yield from (
            say(f"the column {column} is that of {row['same_as']}") for column in row if column not in OF_AN_ALIAS
        )
        yield from _examples(say, row, contexts)
        return
    statuses = [column for column in STATUSES if column in row]
    if len(statuses) != 1:
        yield say(f"needs one of the columns {', '.join(STATUSES)}, and has {', '.join(statuses) or 'none'}")
        return
    if not row[statuses[0]]:
        yield say(f"{statuses[0]} is empty")
    meaning = row.get("meaning", "")
    if not meaning or "\n" in meaning or len(meaning) >= LONGEST_MEANING:
        yield say(f"needs a meaning of one line, below {LONGEST_MEANING} characters")
    for entry in row.get("entry", "train").split():
        if entry not in ENTRIES:
            yield say(f"there is no entry point {entry}")
    for version in (row.get("since"), row.get("until"), *row.get("earlier", ())):
        if version and version not in versions:
            yield say(f"there is no version {version} (known: {', '.join(sorted(versions))})")
    yield from _types(say, row)
    yield from _mapped(say, row, contexts) if "field" in row else _not_mapped(say, row)


def _types(say: Any, row: Row) -> Iterator[str]:
    try:
        type = parse_type(row.get("type", ""))
    except ValueError as error:
        yield say(str(error))
        return
    if type_text(type) != row["type"]:
        yield say(f"the type {row['type']!r} is written {type_text(type)!r}")
    earlier = {f"default of {version}": value for version, value in row.get("earlier", {}).items()}
    for name, value in {"default": row.get("default", ABSENT), **earlier}.items():
        refers = isinstance(value, str) and "${" in value
        if not refers and default_of(value) is not ABSENT and not fits(value, type):
            yield say(f"the {name}, {value!r}, is not {row['type']}")


def _not_mapped(say: Any, row: Row) -> Iterator[str]:
    for column in ("rule", "convert", "change", *EXAMPLES):
        if row.get(column):
            yield say(f"{column} is for mapped keys")


def _mapped(say: Any, row: Row, contexts: set[str]) -> Iterator[str]:
    for entry in row.get("entry", "train").split():
        for field in row["field"].split():
            if entry in ENTRIES and not is_field(field, ENTRIES[entry].root):
                yield say(f"{field} is no field of {ENTRIES[entry].title}")
    if row.get("rule") not in (None, True, False, IF_USED):
        yield say(f"rule is true or {IF_USED!r}")
    if "convert" in row:
        try:
            converter(row["convert"])
        except ValueError as error:
            yield say(str(error))
    yield from _examples(say, row, contexts)


def is_field(field: str, root: type[Section]) -> bool:
    """True for a field of the configuration, or what lies below one that holds an engine's own words."""
    ours, ours_as = known_keys(root), pattern(field, root)
    parents = [ours_as, *(ours_as.rsplit(".", cut)[0] for cut in range(1, ours_as.count(".") + 1))]
    open_ended = any(word in field for word in ("engine_", "options", "overrides", "settings"))
    return any(parent in ours for parent in parents[: None if open_ended else 1])


def _examples(say: Any, row: Row, contexts: set[str]) -> Iterator[str]:
    """A mapped key has an example; what its examples expect is about its fields."""
    if "example" not in row:
        if "field" in row and not row.get("no_example"):
            yield say("a mapped key needs an example, or no_example with the reason")
        return
    cases: Sequence[Mapping[str, Any]] = [row, *row.get("further", ())]
    for case in cases:
        if not isinstance(case.get("example"), str) or not case.get("expected"):
            yield say("an example is a text, as it is written, and comes with what is expected")
        names = {name for name in case.get("given", ()) if "=" not in name and name[0] != "~"}
        yield from (say(f"there is no context {name}") for name in names - contexts)
    for case in row.get("further", ()):
        yield from (say(f"unknown column {column} in further") for column in case if column not in OF_A_CASE)
    expected = {field for case in cases for field in case.get("expected", ())}
    fields = row.get("field", "").split()
    if fields and "only_value" not in row and not any(same_branch(one, field) for one in expected for field in fields):
        yield say(f"no example expects one of its fields ({row['field']})")


def _twice(tables: Tables) -> list[str]:
    """Keys that two rows have, with both places."""
    places: dict[tuple[str, str], str] = {}
    found = []
    for name in tables.names:
        for item in items(tables.folder / f"{name}.json"):
            rows = [item.value] if "key" in item.value else []
            if "use" in item.value and (template := tables.folder / "templates" / f"{item.value['use']}.json").exists():
                rows = list(fill_in(item.value, [one.value for one in items(template)]))
            for row in rows:
                for entry in row.get("entry", "train").split():
                    place = f"{item.file.name}:{item.line}"
                    if (entry, row["key"]) in places:
                        found.append(f"{place} {row['key']}: has a row at {places[entry, row['key']]} already")
                    places[entry, row["key"]] = place
    return found
