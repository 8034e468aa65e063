"""Rows that ranks have computed and stored: joined they are the whole, whoever computed what, and no rank has held it."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.backends.runtime.ray.answers import Answer, answer_of, whole_of
from posttrain.records.partial_tensors import PartialTensor, in_parts, results_in_parts
from posttrain.records.statistics import ForwardBackwardStats
from posttrain.records.stored_rows import HeldArray
from posttrain.records.stored_tensors import StoredTensor

LENGTHS = torch.tensor([3, 0, 5, 1, 4])
# The rows of each rank, in the order of its micro-batches
DEALS: list[list[list[int]]] = [[[0, 1, 2, 3, 4]], [[4, 0], [2], [3, 1]], [[1], [], [3, 2, 0, 4]]]


def log_probs(seed: int) -> Tensor:
    values = torch.rand(5, 5, generator=torch.Generator().manual_seed(seed))
    return torch.where(torch.arange(5) < LENGTHS[:, None], -values, 0.0)


def unread() -> Tensor:
    raise AssertionError("a rank has read the rows of all ranks")


def answers(deal: list[list[int]], result: Any) -> list[Answer]:
    """What the ranks send, as it arrives. Args: result of the rows of a rank."""
    made = [answer_of(result(rows), LENGTHS, HeldArray, first=rank == 0) for rank, rows in enumerate(deal)]
    found: list[Answer] = pickle.loads(pickle.dumps(made))  # noqa: S301
    return found


@pytest.mark.parametrize("deal", DEALS)
def test_parts_joined_are_the_whole(deal: list[list[int]]) -> None:
    first, second = log_probs(1), log_probs(2)

    def result(rows: list[int]) -> tuple[Tensor, ForwardBackwardStats]:
        with results_in_parts():
            both = [in_parts(each[rows], rows, 5, unread) for each in (first, second)]
        stats = ForwardBackwardStats(loss=0.5, sums={"a": 1.0}, tokens=13, policy_logprobs=both[1])
        return both[0], stats

    scores, stats = whole_of(answers(deal, result))
    assert isinstance(scores, StoredTensor) and torch.equal(scores, first)
    assert isinstance(stats.policy_logprobs, StoredTensor) and torch.equal(stats.policy_logprobs, second)
    assert (stats.loss, stats.sums, stats.tokens) == (0.5, {"a": 1.0}, 13)


def test_what_every_rank_has_whole_is_reported_by_the_first() -> None:
    values = log_probs(3)
    found = whole_of(answers(DEALS[1], lambda rows: (values, torch.ones(2, 2))))
    assert torch.equal(found[0], values) and torch.equal(found[1], torch.ones(2, 2))


def test_a_result_is_whole_where_nobody_asks_for_parts_and_where_it_is_read() -> None:
    values = log_probs(4)
    assert in_parts(values[[2]], [2], 5, lambda: values) is values
    with results_in_parts():
        part = in_parts(values[[2]], [2], 5, lambda: values)
    assert isinstance(part, PartialTensor) and part.shape == (5, 5)
    assert torch.equal(part, values) and torch.equal(part[1:3], values[1:3]) and torch.equal(part[:, 2:], values[:, 2:])
