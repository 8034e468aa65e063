"""Prices of orders, in cents."""

from __future__ import annotations

from .shelves import missing

MANY = 10  # pieces of one kind, from which on they are cheaper


def price(order: dict[str, int], each: dict[str, int], percent: int = 20) -> int:
    """Return the price of an order: goods of which MANY or more are bought are so many percent cheaper, rounded down."""
    total = 0
    for name, pieces in order.items():
        cost = pieces * each[name]
        if pieces >= MANY:
            cost = cost * (100 - percent) // 100
        total += cost
    return total


def delivery(cost: int, kilos: int) -> int:
    """Return the price of sending: 500, and 100 for each kilo above 5; free from 10000 on."""
    if cost >= 10000:
        return 0
    return 500 + 100 * max(0, kilos - 5)


def purchase(shelves: dict[str, int], wanted: dict[str, int], each: dict[str, int]) -> int:
    """Return the cost, without discounts, of buying what is missing."""
    return price(missing(shelves, wanted), each, 0)
