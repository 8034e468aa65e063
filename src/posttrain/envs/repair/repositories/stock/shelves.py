"""Goods on shelves, as {name: pieces}."""

from __future__ import annotations


def reserve(shelves: dict[str, int], order: dict[str, int]) -> dict[str, int]:
    """Return the shelves after an order. Raises: KeyError for unknown goods, ValueError when too few are there."""
    left = dict(shelves)
    for name, pieces in order.items():
        if name not in left:
            raise KeyError(name)
        if pieces > left[name]:
            raise ValueError(f"only {left[name]} of {name}")
        left[name] -= pieces
    return left


def missing(shelves: dict[str, int], wanted: dict[str, int]) -> dict[str, int]:
    """Return the pieces that must be bought so that there are as many as wanted, by name; nothing for what is enough."""
    found = {}
    for name in sorted(wanted):
        short = wanted[name] - shelves.get(name, 0)
        if short > 0:
            found[name] = short
    return found
