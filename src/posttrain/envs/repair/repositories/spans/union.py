"""Spans put together."""

from __future__ import annotations


def merged(spans: list[list[int]]) -> list[list[int]]:
    """Join spans that overlap or touch, in order; empty ones are dropped."""
    found: list[list[int]] = []
    for first, end in sorted(spans):
        if first >= end:
            continue
        if found and first <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([first, end])
    return found


def covered(spans: list[list[int]]) -> int:
    """Count the numbers in at least one span."""
    return sum(end - first for first, end in merged(spans))
