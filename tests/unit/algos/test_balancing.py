"""Sharing out by hand, and what holds for any lengths."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.algos import balancing
from posttrain.algos.balancing import balanced_parts, token_budget_parts
from posttrain.errors import RequestError


def test_the_differencing_method_by_hand() -> None:
    # 8, 7, 6, 5, 4 in two: 8 against 7 leaves a difference of 1; 6 against 5 leaves 1; 4 against the first 1 leaves 3, and
    # 3 against the second 1 leaves 2: sums 14 and 16. (15 and 15 exists; the method is not exact.)
    parts = balanced_parts([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][item] for item in part) for part in parts) == [14, 16]


def test_equal_sizes_pair_long_with_short() -> None:
    assert balanced_parts([1, 10, 2, 9], 2, equal_size=True) == [[0, 1], [2, 3]]


def test_a_token_budget_takes_as_few_parts_as_fit() -> None:
    # 7 + 1 and 6 + 2 in 8 tokens each
    assert token_budget_parts([7, 6, 2, 1], 8) == [[0, 3], [1, 2]]
    assert token_budget_parts([7, 6, 2, 1], 16) == [[0, 1, 2, 3]]
    assert len(token_budget_parts([7, 6, 2, 1], 16, at_least=3)) == 3
    assert token_budget_parts([], 8) == []


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(RequestError, match="2 sequences cannot be divided into 3 parts"):
        balanced_parts([1, 1], 3)
    with pytest.raises(RequestError, match="a multiple of 2"):
        balanced_parts([1, 1, 1], 2, equal_size=True)
    with pytest.raises(RequestError, match="9 tokens does not fit a micro-batch of 8"):
        token_budget_parts([9], 8)


@given(loads=st.lists(st.integers(0, 50), min_size=1, max_size=20), parts=st.integers(1, 6))
def test_every_item_is_in_one_part_and_no_part_is_empty(loads: list[int], parts: int) -> None:
    parts = min(parts, len(loads))
    divided = balanced_parts(loads, parts)
    assert len(divided) == parts and all(divided)
    assert sorted(item for part in divided for item in part) == list(range(len(loads)))
    sums = [sum(loads[item] for item in part) for part in divided]
    assert max(sums) - min(sums) <= max(loads)  # the differencing method never leaves more than the largest item


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20), budget=st.integers(30, 60))
def test_no_micro_batch_is_over_budget(lengths: list[int], budget: int) -> None:
    parts = token_budget_parts(lengths, budget)
    assert sorted(item for part in parts for item in part) == list(range(len(lengths)))
    assert all(sum(lengths[item] for item in part) <= budget for part in parts)


@given(loads=st.lists(st.integers(0, 50), min_size=2, max_size=12, unique=True), seed=st.integers(0, 9))
def test_sums_do_not_depend_on_the_order_of_items(loads: list[int], seed: int) -> None:
    shuffled = random.Random(seed).sample(loads, len(loads))

    def sums(values: list[int]) -> list[int]:
        return sorted(sum(values[item] for item in part) for part in balanced_parts(values, 2))

    assert sums(loads) == sums(shuffled)


def test_large_problems_go_the_longest_first_each_to_the_lightest_part(monkeypatch: pytest.MonkeyPatch) -> None:
    # 8 | 7 | then 6 to the 7: 13, 5 to the 8: 13, 4 to the first of the two: 17 and 13. Differencing finds 14 and 16.
    monkeypatch.setattr(balancing, "MOST_DIFFERENCED", 4)
    assert balanced_parts([8, 7, 6, 5, 4], 2) == [[0, 3, 4], [1, 2]]
    # Two at a time: 9 | 8, then 3 to the 8 and 1 to the 9; then 1 | 0
    assert balanced_parts([9, 8, 3, 1], 2, equal_size=True) == [[0, 3], [1, 2]]
    # Loads of 0 fill empty parts first.
    assert balanced_parts([5, 0, 0, 0, 0], 3) == [[0], [1, 3], [2, 4]]


@given(loads=st.lists(st.integers(0, 50), min_size=1, max_size=20), parts=st.integers(1, 6), equal=st.booleans())
def test_large_problems_keep_the_promises_of_small_ones(loads: list[int], parts: int, equal: bool) -> None:
    parts = min(parts, len(loads))
    loads = loads[: len(loads) // parts * parts] if equal else loads
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balancing, "MOST_DIFFERENCED", 0)
        divided = balanced_parts(loads, parts, equal_size=equal)
    assert len(divided) == parts and all(divided)
    assert sorted(item for part in divided for item in part) == list(range(len(loads)))
    sums = [sum(loads[item] for item in part) for part in divided]
    assert max(sums) - min(sums) <= max(loads)
    assert not equal or len({len(part) for part in divided}) == 1


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8), budget=st.integers(30, 60))
def test_the_fewest_parts_are_never_more_than_an_exact_search_needs(lengths: list[int], budget: int) -> None:
    def fits(left: list[int], parts: tuple[int, ...]) -> bool:
        if not left:
            return True
        places = {load: place for place, load in enumerate(parts) if load + left[0] <= budget}.values()
        return any(fits(left[1:], (*parts[:p], parts[p] + left[0], *parts[p + 1 :])) for p in places)

    needed = next(count for count in range(1, 9) if fits(lengths, (0,) * count))
    assert balancing._fewest_parts(lengths, budget) <= needed


def test_two_hundred_thousand_sequences_are_divided_without_differencing() -> None:
    # 32 of 500 tokens fit 16,384, so 6,250 parts, where the sum alone would ask for 6,104.
    assert len(token_budget_parts([500] * 200_000, 16_384)) == 6_250
