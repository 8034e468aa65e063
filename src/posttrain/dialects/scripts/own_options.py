"""Options that a program of the user's own reads by itself, with argparse, before it passes the other words on as overrides."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

_FLAGS = ("store_true", "store_false", "store_const", "count")


def options_of(source: ast.Module) -> dict[str, bool]:
    """Return the options that a program declares, ``add_argument("--variant", ...)``: True for one that a value follows."""
    found: dict[str, bool] = {}
    for node in ast.walk(source):
        if not (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"
        ):
            continue
        names = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        actions = [ast.unparse(one.value).strip("'\"") for one in node.keywords if one.arg == "action"]
        found |= {name: not (actions and actions[0] in _FLAGS) for name in names if name.startswith("-")}
    return found


def given_options(words: Sequence[str], options: Mapping[str, bool]) -> dict[str, str]:
    """Return the declared options of a command with their values, under the names that the program has for them."""
    return {name.lstrip("-").replace("-", "_"): value for name, value, _ in _found(words, options)}


def without_options(words: Sequence[str], options: Mapping[str, bool]) -> list[str]:
    """Return the words of a command without the declared options and their values."""
    left_out = {place for _, _, places in _found(words, options) for place in places}
    return [word for place, word in enumerate(words) if place not in left_out]


def _found(words: Sequence[str], options: Mapping[str, bool]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield name, value and places of each declared option."""
    place = 0
    while place < len(words):
        name, equals, value = words[place].partition("=")
        places: tuple[int, ...] = (place,)
        if name in options:
            if options[name] and not equals and place + 1 < len(words):
                value, places = words[place + 1], (place, place + 1)
            yield name, value, places
        place += len(places)
