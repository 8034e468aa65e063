"""Tensors of spans are the tensors of their values: every function gives what it gives for plain tensors, to the bit."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from posttrain.records.span_tensors import (
    SpanTensor,
    at_places,
    first_columns,
    first_places,
    kept_rows,
    last_places,
    mask_of_flags,
    row_counts,
    runs_of,
    spread,
    with_values,
)

WIDTH = 9
# Rows of an episode's flags, each as long as its response
flags = st.lists(st.lists(st.booleans(), max_size=WIDTH), min_size=1, max_size=6)
numbers = st.sampled_from([0.0, -0.0, 1.5, -2.25, float("nan"), float("inf")])


def plain_mask(rows: list[list[bool]]) -> Tensor:
    return torch.tensor([row + [False] * (WIDTH - len(row)) for row in rows])


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().numpy().tobytes()


def test_spans_by_hand() -> None:
    """Two turns with an observation of one token between them; an empty response; one turn."""
    mask = mask_of_flags([[True, True, False, True], [], [True]], 5)
    assert isinstance(mask, SpanTensor) and mask.shape == (3, 5) and mask.dtype == torch.bool
    assert (mask.spans.first.tolist(), mask.spans.begins.tolist(), mask.spans.ends.tolist()) == (
        [0, 2, 2, 3],
        [0, 3, 0],
        [2, 4, 1],
    )
    assert mask.tolist() == [[True, True, False, True, False], [False] * 5, [True, False, False, False, False]]
    assert row_counts(mask).tolist() == [3, 0, 1] and last_places(mask).tolist() == [4, 0, 1]
    advantages = spread(torch.tensor([0.5, 7.0, -1.0]), mask)
    assert advantages.tolist() == [[0.5, 0.5, 0.0, 0.5, 0.0], [0.0] * 5, [-1.0, 0.0, 0.0, 0.0, 0.0]]
    assert at_places(advantages, torch.tensor([2, 0, 0])).tolist() == [0.0, 0.0, -1.0]


@given(flags, st.data())
def test_functions_give_what_they_give_for_plain_tensors(rows: list[list[bool]], data: st.DataObject) -> None:
    mask, plain = mask_of_flags(rows, WIDTH), plain_mask(rows)
    count = len(rows)
    values = torch.tensor(data.draw(st.lists(numbers, min_size=count, max_size=count)))
    kept = torch.tensor(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    places = torch.tensor(data.draw(st.lists(st.integers(0, WIDTH - 1), min_size=count, max_size=count)))
    assert bits(mask) == bits(plain)
    for of in (row_counts, first_places, last_places):
        assert of(mask).dtype == torch.int64 and torch.equal(of(mask), of(plain)), of
    part = kept_rows(mask, kept)
    assert isinstance(part, SpanTensor) and bits(part) == bits(kept_rows(plain, kept))
    on_tokens = spread(values, part)
    assert isinstance(on_tokens, SpanTensor) and bits(on_tokens) == bits(spread(values, kept_rows(plain, kept)))
    assert bits(at_places(on_tokens, places)) == bits(at_places(on_tokens.read(), places))
    cut = with_values(on_tokens, lambda each: each.clamp(-2.0, 2.0))
    assert isinstance(cut, SpanTensor) and bits(cut) == bits(on_tokens.read().clamp(-2.0, 2.0))


@given(flags, st.data())
def test_rows_columns_and_messages_are_those_of_the_values(rows: list[list[bool]], data: st.DataObject) -> None:
    mask, plain = mask_of_flags(rows, WIDTH), plain_mask(rows)
    tensor, values = spread(torch.arange(1.0, 1 + len(rows)), mask), spread(torch.arange(1.0, 1 + len(rows)), plain)
    row = st.integers(0, len(rows) - 1)
    index: Any = data.draw(
        st.one_of(
            st.builds(slice, st.integers(0, len(rows)), st.integers(0, len(rows))),
            st.lists(row, max_size=8).map(lambda some: torch.tensor(some, dtype=torch.int64)),
            st.just(torch.arange(len(rows)) % 2 == 0),
        )
    )
    column = data.draw(st.integers(0, WIDTH))
    taken = tensor[index]
    assert isinstance(taken, SpanTensor) and taken.shape == values[index].shape and torch.equal(taken, values[index])
    behind = tensor[:, column:]
    assert isinstance(behind, SpanTensor) and torch.equal(behind, values[:, column:])
    assert torch.equal(tensor[index, column:], values[index][:, column:])
    sent = pickle.loads(pickle.dumps(taken))  # noqa: S301
    assert isinstance(sent, SpanTensor) and torch.equal(sent, values[index])


def test_a_mask_of_one_turn() -> None:
    lengths = torch.tensor([2, 0, 4])
    mask = first_columns(lengths, 4)
    assert torch.equal(mask, torch.arange(4) < lengths[:, None]) and torch.equal(row_counts(mask), lengths)


@pytest.mark.parametrize(
    "edit",
    [
        lambda tensor: tensor.mul_(2.0),
        lambda tensor: tensor.__setitem__(0, 3.0),
        lambda tensor: tensor.__iadd__(1.0),
        lambda tensor: tensor.clamp_(0, 1),
    ],
)
def test_an_edit_would_be_lost_and_is_refused(edit: Callable[[Tensor], Any]) -> None:
    tensor = spread(torch.tensor([0.5]), first_columns(torch.tensor([2]), 3))
    with pytest.raises(RuntimeError, match="edit a copy"):
        edit(tensor)
    copy = tensor.clone()
    edit(copy)
    assert type(copy) is Tensor and tensor.tolist() == [[0.5, 0.5, 0.0]]


@pytest.mark.parametrize(
    "rows",
    [
        [[True, True, False], [False, False, False], [True, True, True]],
        [[0.5, 0.5, 0.0], [-1.25, 0.0, 0.0], [float("nan"), float("nan"), 0.0]],
        [[-0.0, -0.0, 0.0]],
        [[3, 3, 3], [0, 0, 0]],
    ],
)
def test_runs_give_the_values_back_to_the_bit(rows: list[list[Any]]) -> None:
    tensor = torch.tensor(rows)
    runs = runs_of(tensor)
    assert runs is not None and runs.dtype == tensor.dtype
    assert runs.read().numpy().tobytes() == tensor.numpy().tobytes()


@pytest.mark.parametrize("row", [[0, 1, 1], [1, 0, 1], [1, 2, 0], [0.0, -0.0, 0.0], [1.0, 1.0, -0.0]])
def test_other_values_are_no_runs(row: list[Any]) -> None:
    assert runs_of(torch.tensor([row])) is None
