"""YAML that somebody else wrote: how deep it nests, and what its aliases amount to, is measured before anything is built.

Nine lines of nine aliases each stand for 9^9 values, and a parser that recurses ends at some 300 levels.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import yaml
from yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, ScalarEvent

MAX_DEPTH = 100
MAX_VALUES = 100_000
MAX_DIGITS = 4_000  # Python reads no whole number above 4,300

# libyaml's parser, where PyYAML was built with it, is ten times as fast.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class TooMuch(yaml.MarkedYAMLError):
    """More levels or values than a file of settings has."""


def check(text: str) -> None:
    """Raises: TooMuch, with its place, for more than MAX_DEPTH levels, more than MAX_VALUES values with every alias written
    out, or a number of more than MAX_DIGITS digits. Broken YAML passes as far as it can be read: its parser reports it."""
    with suppress(yaml.reader.ReaderError, yaml.scanner.ScannerError, yaml.parser.ParserError):
        _measure(text)


def _measure(text: str) -> None:
    sizes: dict[str, int] = {}  # values of every anchor that is complete
    # Anchor of every collection around this place, and the count when it began
    open_: list[tuple[str | None, int]] = []
    count = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, CollectionEndEvent):
            anchor, before = open_.pop()
            if anchor is not None:
                sizes[anchor] = count - before
            continue
        if isinstance(event, AliasEvent):
            count += sizes.get(event.anchor or "", 1)
        elif isinstance(event, CollectionStartEvent):
            open_.append((event.anchor, count))
            count += 1
        elif isinstance(event, ScalarEvent):
            count += 1
            if event.implicit[0] and len(event.value) > MAX_DIGITS and event.value.lstrip("+-").isdecimal():
                place: Any = event.start_mark
                raise TooMuch(problem=f"a number of {len(event.value)} digits", problem_mark=place)
            if event.anchor is not None:
                sizes[event.anchor] = 1
        mark: Any = event.start_mark
        if len(open_) > MAX_DEPTH:
            raise TooMuch(problem=f"lists and mappings nest more than {MAX_DEPTH} deep", problem_mark=mark)
        if count > MAX_VALUES:
            what = f"more than {MAX_VALUES:,} values, with every alias (*name) written out"
            raise TooMuch(problem=what, problem_mark=mark)


def safe_load(text: str) -> Any:
    """Build the plain values of a document that ``check`` passes.

    Raises: yaml.YAMLError in the words of PyYAML's own parser, which other code describes.
    """
    check(text)
    with suppress(yaml.YAMLError):
        return yaml.load(text, Loader=_LOADER)  # CSafeLoader, or SafeLoader without libyaml
    return yaml.load(text, Loader=yaml.SafeLoader)


def compose(text: str) -> yaml.Node | None:
    """Parse one document to its nodes.

    Raises: yaml.YAMLError in the words of PyYAML's own parser, which other code describes.
    """
    with suppress(yaml.YAMLError):
        return yaml.compose(text, Loader=_LOADER)
    return yaml.compose(text, Loader=yaml.SafeLoader)
