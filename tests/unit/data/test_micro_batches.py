"""Micro-batches by count and by a budget of tokens."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batches import sequence_batch
from posttrain.data.micro_batches import in_row_order, micro_batches
from posttrain.data.packing import pack
from posttrain.errors import RequestError
from posttrain.records.batches import SequenceBatch


def make_batch(groups: list[tuple[int, list[int]]]) -> SequenceBatch:
    """Groups of (prompt tokens, tokens of each response)."""
    rows = [(group, prompt, response) for group, (prompt, responses) in enumerate(groups) for response in responses]
    width, length = max(prompt for _, prompt, _ in rows), max(response for *_, response in rows)
    tokens = torch.zeros(len(rows), width + length, dtype=torch.int64)
    for row, (group, _, _) in enumerate(rows):
        tokens[row, :width] = group
    mask = torch.arange(length) < torch.tensor([[response] for *_, response in rows])
    return sequence_batch(
        tokens=tokens,
        prompt_lengths=torch.tensor([prompt for _, prompt, _ in rows]),
        response_mask=mask,
        rollout_logprobs=torch.zeros(mask.shape),
        group_index=torch.tensor([group for group, *_ in rows]),
    )


def test_by_count_in_order_with_a_smaller_last_one() -> None:
    batch = make_batch([(3, [1, 2, 3]), (2, [1, 1])])
    assert micro_batches(batch, 2) == [[0, 1], [2, 3], [4]]
    assert micro_batches(batch, 100) == [[0, 1, 2, 3, 4]]


def test_by_tokens_a_shared_prompt_counts_once() -> None:
    # Groups of 10 + 2 + 2 + 2 = 16 and 4 + 6 + 2 = 12 tokens: 28 together. Without sharing 12 + 12 + 12 + 10 + 6 = 52.
    batch = make_batch([(10, [2, 2, 2]), (4, [6, 2])])
    assert micro_batches(batch, 1, 28) == [[0, 1, 2, 3, 4]]
    assert micro_batches(batch, 1, 27) == [[0, 1, 2], [3, 4]]
    assert micro_batches(batch, 1, 52, share_prompts=False) == [[0, 1, 2, 3, 4]]
    # In two parts of about the same: 12 + 12 = 24 and 12 + 10 + 6 = 28.
    parts = micro_batches(batch, 1, 28, share_prompts=False)
    assert sorted(sum((12, 12, 12, 10, 6)[row] for row in part) for part in parts) == [24, 28]


def test_group_above_the_budget_is_divided() -> None:
    # 10 + 4 x 5 = 30 tokens with a budget of 20: 10 + 5 + 5 twice.
    parts = micro_batches(make_batch([(10, [5, 5, 5, 5])]), None, 20)
    assert sorted(map(len, parts)) == [2, 2]
    assert sorted(chain.from_iterable(parts)) == [0, 1, 2, 3]


def test_row_above_the_budget_is_refused() -> None:
    with pytest.raises(
        RequestError, match=r"of 13 tokens do not fit into a micro-batch of 12 tokens; allow at least 13"
    ):
        micro_batches(make_batch([(10, [2, 3]), (4, [1])]), None, 12)


def test_row_without_a_response_counts_its_prompt() -> None:
    assert micro_batches(make_batch([(5, [0, 1])]), None, 6) == [[0], [1]]


def test_parts_come_back_in_row_order() -> None:
    rows = [[1, 3], [0, 4], [2]]
    parts = [torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [4.0]]), torch.tensor([[2.0]])]
    assert in_row_order(parts, rows).flatten().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


groups = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(0, 20), min_size=1, max_size=6)), min_size=1, max_size=6
).filter(lambda groups: any(response for _, responses in groups for response in responses))


@given(groups=groups, extra=st.integers(0, 60), share=st.booleans(), order=st.randoms(use_true_random=False))
def test_every_row_once_and_no_packed_row_above_the_budget(
    groups: list[tuple[int, list[int]]], extra: int, share: bool, order
) -> None:
    batch = make_batch(groups)
    rows = list(range(len(batch)))
    order.shuffle(rows)
    batch = batch.rows(rows)
    budget = int((batch.prompt_lengths + batch.response_lengths).max()) + extra
    parts = micro_batches(batch, None, budget, share_prompts=share)
    assert parts == micro_batches(batch, None, budget, share_prompts=share)
    assert sorted(chain.from_iterable(parts)) == list(range(len(batch)))
    for part in parts:
        assert part == sorted(part)
        assert len(pack(batch.rows(part), share_prompts=share).token_ids) <= budget
