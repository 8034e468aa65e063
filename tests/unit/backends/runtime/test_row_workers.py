"""Functions of rows are computed where the values lie: shares in rank order, the same bits for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from posttrain.backends.runtime.ray.proxies import RowWorkers
from posttrain.backends.runtime.ray.shelf import Shelf, taken_down
from posttrain.backends.runtime.ray.wire import to_plain
from posttrain.backends.runtime.ray.worker_group import WorkerGroup
from posttrain.records.stored_rows import HeldArray
from posttrain.records.stored_tensors import stored_rows
from posttrain.records.unread_tensors import UnreadTensor
from posttrain.steps.measure import gap_metrics, off_policy_metrics

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


def test_what_is_here_already_is_computed_here() -> None:
    sampled, trained, mask = log_probs()
    nobody = cast(WorkerGroup, SimpleNamespace())
    assert gap_metrics(sampled, trained, mask, RowWorkers(nobody)) == gap_metrics(sampled, trained, mask)
