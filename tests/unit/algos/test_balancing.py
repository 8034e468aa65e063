"""Sharing out by hand, and what holds for any lengths."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
