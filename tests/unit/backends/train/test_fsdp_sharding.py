"""How micro-batches are dealt out over processes; what needs processes is in tests/parity/test_update_paths.py."""

from __future__ import annotations

import pytest

from posttrain.backends.train.fsdp.sharding import FsdpSharding


def dealt(parts: list[list[int]], loads: list[int], ranks: int) -> list[list[list[int]]]:
    """What every process gets, without starting them."""
    everyone = []
    for rank in range(ranks):
        sharding = object.__new__(FsdpSharding)
        sharding.rank, sharding.ranks = rank, ranks
        everyone.append(sharding.deal(parts, loads))
    return everyone


def test_heavy_micro_batches_are_shared_out() -> None:
    # 9 + 1 and 5 + 5 tokens
    assert dealt([[0], [1, 2], [3], [4]], [9, 5, 1, 5], 2) == [[[0], [3]], [[1, 2], [4]]]


@pytest.mark.parametrize(("count", "ranks"), [(1, 2), (5, 2), (7, 3), (2, 4), (6, 1)])
def test_everyone_makes_as_many_passes_and_every_row_is_dealt_once(count: int, ranks: int) -> None:
    parts = [[2 * number, 2 * number + 1] for number in range(count)]
    everyone = dealt(parts, [number + 1 for number in range(count)], ranks)
    assert {len(mine) for mine in everyone} == {-(-count // ranks)}
    assert sorted(row for mine in everyone for part in mine for row in part) == list(range(2 * count))
