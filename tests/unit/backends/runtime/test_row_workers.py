"""Functions of rows are computed where the values lie: shares in rank order, the same bits for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from posttrain.algos.kl_reward import sums_of_rows
from posttrain.algos.statistics import moments_of_rows
from posttrain.backends.runtime.ray.proxies import RowWorkers
from posttrain.backends.runtime.ray.shelf import Shelf, taken_down
from posttrain.backends.runtime.ray.wire import to_plain
from posttrain.backends.runtime.ray.worker_group import WorkerGroup
from posttrain.records.computed_tensors import of_each_row_together
from posttrain.records.stored_rows import HeldArray
from posttrain.records.stored_tensors import stored_rows
from posttrain.records.unread_tensors import UnreadTensor
from posttrain.steps.measure import gap_metrics, off_policy_metrics
from posttrain.steps.row_numbers import gaps_of_rows

LENGTHS = torch.tensor([3, 0, 5, 1, 5, 2, 4])


class Workers:
    """Ranks that look only at what they are sent; a promise is its value."""

    def __init__(self, ranks: int):
        self.members = list(range(ranks))
        self.shelf = Shelf(lambda value: value, HeldArray)
        self.shares: list[list[Tensor]] = []

    def scatter(self, method: str, asked: Sequence[tuple[Any, ...]], *, what: str) -> list[Any]:
        assert method == "rows_of"
        return [self._rows_of(*each) for each in asked]

    def _rows_of(self, of: Callable[..., Tensor], tensors: Any, *arrays: Any) -> Any:
        self.shares.append(taken_down(tensors, arrays))
        return to_plain(of(*self.shares[-1]))


def log_probs() -> tuple[Tensor, Tensor, Tensor]:
    mask = torch.arange(5) < LENGTHS[:, None]
    draw = torch.Generator().manual_seed(3)
    first, second = (torch.where(mask, -torch.rand(7, 5, generator=draw), 0.0) for _ in range(2))
    return first, second, mask


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 9])
def test_metrics_are_the_same_to_the_bit_for_any_number_of_ranks(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.backends.runtime.ray.shelf.SMALLEST", 1)
    sampled, trained, mask = log_probs()
    stored = [stored_rows(each, LENGTHS, HeldArray) for each in (sampled, trained)]
    workers = Workers(ranks)
    over_rows = RowWorkers(cast(WorkerGroup, workers))
    assert gap_metrics(*stored, mask, over_rows) == gap_metrics(sampled, trained, mask)
    assert off_policy_metrics(*stored, mask, over_rows) == off_policy_metrics(sampled, trained, mask)
    shares = [len(tensors[0]) for tensors in workers.shares]
    assert sum(shares) == 2 * 7 and len(shares) == 2 * min(ranks, 7) and max(shares) - min(shares) <= 1
    assert all(isinstance(each, UnreadTensor) for tensors in workers.shares for each in tensors)
    # By hand, of the tokens as one list
    gaps = (sampled - trained)[mask].abs().double()
    expected = {"gap/mean": gaps.mean().item(), "gap/max": gaps.max().item()}
    found = gap_metrics(*stored, mask, over_rows)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("ranks", [1, 3])
def test_questions_about_the_same_rows_are_one_call_with_the_same_bits(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.backends.runtime.ray.shelf.SMALLEST", 1)
    sampled, trained, mask = log_probs()
    stored = [stored_rows(each, LENGTHS, HeldArray) for each in (sampled, trained)]
    workers = Workers(ranks)
    questions = [
        (gaps_of_rows, (*stored, mask)),
        (sums_of_rows, (stored[0],)),  # of float32
        (sums_of_rows, (sampled,)),  # which is here
        (moments_of_rows, (stored[1], mask)),
        (gaps_of_rows, tuple(each[:4] for each in (*stored, mask))),  # of other rows: a call of its own
    ]
    found = of_each_row_together(questions, RowWorkers(cast(WorkerGroup, workers)))
    plain = {id(stored[0]): sampled, id(stored[1]): trained}
    expected = [of(*(plain.get(id(each), each) for each in tensors)) for of, tensors in questions[:-1]]
    expected.append(gaps_of_rows(sampled[:4], trained[:4], mask[:4]))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    assert len(workers.shares) == 2 * ranks


def test_what_is_here_already_is_computed_here() -> None:
    sampled, trained, mask = log_probs()
    nobody = cast(WorkerGroup, SimpleNamespace())
    assert gap_metrics(sampled, trained, mask, RowWorkers(nobody)) == gap_metrics(sampled, trained, mask)
