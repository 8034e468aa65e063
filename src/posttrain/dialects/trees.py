"""Nested values by dotted keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOTHING = object()


def parents(key: str) -> list[str]:
    """Return the dotted sections around a key, the nearest first."""
    parts = key.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


def value_at(values: Any, key: str) -> Any:
    """Return the value at a dotted key, through sections and lists; NOTHING where there is none."""
    node = values
    for part in key.split("."):
        if isinstance(node, dict) and part in node:
            node = node[part]
        elif isinstance(node, list) and part.isdecimal() and int(part) < len(node):
            node = node[int(part)]
        else:
            return NOTHING
    return node


def nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``{"a.b": 1}`` -> ``{"a": {"b": 1}}``; a field that ends below a dict field becomes an entry of it."""
    tree: dict[str, Any] = {}
    for name in sorted(fields, key=lambda name: name.count(".")):
        node = tree
        *above, leaf = name.split(".")
        for part in above:
            # Not there yet, or a list, whose items cannot be named: refused later
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        value = fields[name]
        both = isinstance(value, dict) and isinstance(node.get(leaf), dict)
        node[leaf] = {**node[leaf], **value} if both else value
    return tree
