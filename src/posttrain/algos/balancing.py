"""Sharing sequences out so that every part has about the same load: the largest differencing method, and for problems that are
too large for it the longest first, each to the lightest part."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence

from posttrain.errors import Problem, RequestError

# Differencing takes more than about half a second above either: its divisions are tuples of all parts, with all their items.
MOST_DIFFERENCED = 10_000  # items
LARGEST_DIFFERENCED = 400_000  # items x parts
_Part = tuple[int, tuple[int, ...]]  # load, items


# Some of the items, shared out: (load, items) of every part, heaviest first, empty ones last (also among loads of 0), so that
# joining two divisions fills empty parts first. Before them stands the spread of the loads, below 0: of two the more uneven one
# is less; ties are broken by what the parts hold, so that the result never depends on chance.
_Division = tuple[int, list[_Part]]


def _division(parts: list[_Part]) -> _Division:
    ordered = sorted(parts, reverse=True)
    return ordered[-1][0] - ordered[0][0], ordered


def _joined(one: _Division, other: _Division) -> _Division:
    """Heaviest with lightest, part by part."""
    pairs = zip(one[1], reversed(other[1]), strict=True)
    return _division([(mine + theirs, items + others) for (mine, items), (theirs, others) in pairs])


def balanced_parts(loads: Sequence[int], parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """The items' numbers, divided into ``parts`` non-empty parts of about the same total load.

    Args: loads, one whole number per item, such as its tokens; equal_size asks for the same number of items in every part.
    Returns: parts of ascending item numbers, ordered by their first.
    Raises: RequestError when there are fewer items than parts, or their number is no multiple of it with equal_size.
    Either way no two parts differ by more than the largest load.
    Source: N. Karmarkar and R. Karp, "The differencing method of set partitioning", 1982; for equal sizes, W. Michiels et
        al., "Performance ratios for the differencing method", 2004. Above MOST_DIFFERENCED: R. Graham, "Bounds on
        multiprocessing timing anomalies", 1969.
    """
    if len(loads) < parts or (equal_size and len(loads) % parts):
        wanted = f"a multiple of {parts}" if equal_size else f"at least {parts}"
        raise RequestError(Problem(f"{len(loads)} sequences cannot be divided into {parts} parts: {wanted} are needed"))
    if len(loads) > MOST_DIFFERENCED or len(loads) * parts > LARGEST_DIFFERENCED:
        return _longest_first(loads, parts, equal_size=equal_size)
    ordered = sorted((load, item) for item, load in enumerate(loads))
    alone: list[_Part] = [(load, (item,)) for load, item in ordered]
    if equal_size:
        starts = [alone[i : i + parts] for i in range(0, len(alone), parts)]
    else:
        empty: _Part = (0, ())
        starts = [[part] + [empty] * (parts - 1) for part in alone]
    heap = list(map(_division, starts))
    heapq.heapify(heap)
    while len(heap) > 1:
        one = heapq.heappop(heap)
        heapq.heapreplace(heap, _joined(one, heap[0]))
    return sorted(sorted(items) for _, items in heap[0][1])


def _longest_first(loads: Sequence[int], parts: int, *, equal_size: bool) -> list[list[int]]:
    """Each item to the lightest part, the longest items first; with equal_size ``parts`` items at a time, one to each part."""
    order = sorted(range(len(loads)), key=lambda item: (-loads[item], item))
    found: list[list[int]] = [[] for _ in range(parts)]
    if equal_size:
        totals = [0] * parts
        for start in range(0, len(order), parts):
            lightest = sorted(range(parts), key=totals.__getitem__)
            for part, item in zip(lightest, order[start : start + parts], strict=True):
                found[part].append(item)
                totals[part] += loads[item]
    else:
        # Load, then items: of equal parts an empty one is filled first, also by loads of 0.
        heap = [(0, 0, part) for part in range(parts)]
        for item in order:
            total, size, part = heap[0]
            found[part].append(item)
            heapq.heapreplace(heap, (total + loads[item], size + 1, part))
    return sorted(sorted(items) for items in found)


def token_budget_parts(lengths: Sequence[int], max_tokens: int, *, at_least: int = 1) -> list[list[int]]:
    """The sequences' numbers, divided into as few balanced micro-batches as hold at most max_tokens tokens each.

    Tries ``at_least`` parts, or the fewest that could do (``_fewest_parts``), then one more at a time (of hundreds of parts,
    one in 256 more), until the balanced parts all fit.

    Returns: parts of ascending numbers, ordered by their first.
    Raises: RequestError when one sequence alone is longer than max_tokens, or there are fewer sequences than at_least.
    """
    if not lengths:
        return []
    if max(lengths) > max_tokens:
        raise RequestError(
            Problem(
                f"a sequence of {max(lengths)} tokens does not fit a micro-batch of {max_tokens} tokens",
                fix=f"allow at least {max(lengths)} tokens per micro-batch",
            )
        )
    count = max(at_least, _fewest_parts(lengths, max_tokens))
    while True:
        parts = balanced_parts(lengths, count)
        if all(sum(lengths[item] for item in part) <= max_tokens for part in parts):
            return parts
        count += 1 + count // 256


def _fewest_parts(lengths: Sequence[int], max_tokens: int) -> int:
    """A number of parts that no division is below: the sum of the tokens needs so many, or the long ones do. Sequences longer
    than a (k + 1)th of the budget fit k to a part."""
    ordered = sorted(lengths)
    fewest = max(-(-sum(ordered) // max_tokens), 1)
    for k in range(1, max_tokens // max(ordered[0], 1) + 1):
        long = len(ordered) - bisect_right(ordered, max_tokens // (k + 1))
        fewest = max(fewest, -(-long // k))
        if long == len(ordered):
            break
    return fewest
