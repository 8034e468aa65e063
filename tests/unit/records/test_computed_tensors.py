"""Rows that are computed where they are read: the bits of one process, and nothing read where nobody computes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from posttrain.algos.advantages.gae import gae
from posttrain.algos.advantages.reinforce import reinforce
from posttrain.algos.advantages.reinforce_plus_plus import reinforce_plus_plus
from posttrain.algos.kl import token_kl
from posttrain.algos.kl_reward import penalize_kl
from posttrain.algos.rollout_correction import importance_weights
from posttrain.algos.statistics import value_fit, whiten
from posttrain.records.computed_tensors import ComputedTensor, by_rows, of_each_row, rows_computed_by
from posttrain.records.span_tensors import first_columns, kept_rows, last_columns, spread, with_values
from posttrain.records.stored_rows import HeldArray
from posttrain.records.stored_tensors import stored_rows

B, T = 37, 50


class Elsewhere(HeldArray):
    """An array that may be read by workers alone."""

    working = False

    def read(self) -> NDArray[Any]:
        assert Elsewhere.working, "the driver has read tokens"
        return super().read()


@contextmanager
def a_worker() -> Iterator[None]:
    Elsewhere.working = True
    try:
        yield
    finally:
        Elsewhere.working = False


def on_ranks(ranks: int) -> Callable[..., Tensor]:
    def over_rows(of: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        bounds = [B * rank // ranks for rank in range(ranks + 1)]
        with a_worker():
            return torch.cat([of(*(each[begin:end] for each in tensors)) for begin, end in pairwise(bounds)])

    return over_rows


@pytest.fixture
def rows() -> dict[str, Tensor]:
    """Of a step: responses of 0 to T tokens, some of them invalid."""
    made = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, T + 1, (B,), generator=made)
    lengths[0] = T
    mask = first_columns(lengths, T)
    numbers = {name: torch.randn(B, T, generator=made) for name in ("values", "old", "ref")}
    numbers = {name: torch.where(mask, each, 0.0) for name, each in numbers.items()}
    rewards = torch.randn(B, generator=made)
    valid = torch.rand(B, generator=made) > 0.2
    return {**numbers, "lengths": lengths, "mask": mask, "rewards": rewards, "valid": valid}


def stored(tensor: Tensor, lengths: Tensor) -> Tensor:
    return stored_rows(tensor, lengths, Elsewhere)


def step_of(rows: dict[str, Tensor], place: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """A KL in the reward, generalised advantages and the measures of a critic, of tensors that ``place`` has put somewhere."""
    values, old, ref = (place(rows[name]) for name in ("values", "old", "ref"))
    mask = rows["mask"]
    placed = spread(rows["rewards"], last_columns(rows["lengths"], T))
    kl = by_rows(partial(token_kl, "k3"), old, ref, kept_rows(mask, rows["valid"]), dtype=torch.float32)
    token_rewards, _, measured = penalize_kl(placed, kl, kept_rows(mask, rows["valid"]), kl_coef=0.3)
    advantages, returns = gae(token_rewards, values, rows["valid"], mask, gamma=0.9, gae_lambda=0.8)
    again = whiten(with_values(advantages, partial(torch.clamp, min=-1, max=1)), kept_rows(mask, rows["valid"]))
    corrected = {
        level: importance_weights(old, ref, mask, level=level, high=2.0, low=low)
        for level, low in (("token", None), ("sequence", 0.5), ("sequence_mean", None), ("turn", 0.5))
    }
    return {
        **corrected,
        "measured": measured,
        "fit": value_fit(values, returns, kept_rows(mask, rows["valid"])),
        "token_rewards": token_rewards,
        "advantages": advantages,
        "returns": returns,
        "again": again,
        "reinforce": reinforce(token_rewards, rows["valid"], mask, gamma=0.9),
        "reinforce_plus_plus": reinforce_plus_plus(token_rewards, rows["valid"], mask, gamma=0.9),
    }


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_ranks_compute_the_bits_of_one_process(rows: dict[str, Tensor], ranks: int) -> None:
    here = step_of(rows, lambda tensor: tensor)
    with rows_computed_by(on_ranks(ranks)):
        there = step_of(rows, lambda tensor: stored(tensor, rows["lengths"]))
    assert there["measured"] == here["measured"] and there["fit"] == here["fit"]
    for name, found in there.items():
        if isinstance(found, Tensor):
            assert isinstance(found, ComputedTensor), name
            assert found.dtype == here[name].dtype == torch.float32
            # A rank takes rows of what the driver has sent it
            chosen = pickle.loads(pickle.dumps(found[torch.tensor([5, 0, 9])].with_arrays(lambda array: array)))  # noqa: S301
            with a_worker():
                assert torch.equal(chosen + 0.0, here[name][[5, 0, 9]]), name
                assert torch.equal(found.gathered().read(), here[name]), name


def test_whitened_by_hand() -> None:
    # 1, 2, 6: mean 3, squares 4 + 1 + 9 = 14, sample variance 7
    values, mask = torch.tensor([[1.0, 2.0], [6.0, torch.nan]]), torch.tensor([[True, True], [True, False]])
    expected = torch.tensor([[-2.0, -1.0], [3.0, 0.0]]) / 7**0.5
    torch.testing.assert_close(whiten(values, mask), expected)
    assert torch.equal(whiten(torch.full((2, 2), 0.1), mask), torch.zeros(2, 2))


def test_values_and_returns_by_hand() -> None:
    # Returns 1, 2, 6: mean 3, squares 14. Errors 1, -1, 3: mean 1, squares 0 + 4 + 4 = 8
    returns = torch.tensor([[1.0, 2.0], [6.0, torch.nan]])
    mask = torch.tensor([[True, True], [True, False]])
    fit = value_fit(torch.tensor([[0.0, 3.0], [3.0, torch.nan]]), returns, mask)
    assert (fit.values_mean, fit.returns_mean) == (2.0, 3.0)
    assert fit.explained_variance == pytest.approx(1 - 8 / 14)
    assert value_fit(returns, torch.full((2, 2), 0.1), mask).explained_variance is None


def test_a_number_of_each_row_is_computed_here_where_nobody_else_is_named() -> None:
    assert of_each_row(lambda values: values.sum(dim=1, keepdim=True), torch.ones(2, 3)).tolist() == [[3.0], [3.0]]


def test_the_last_of_the_first_columns() -> None:
    assert last_columns(torch.tensor([2, 0, 3]), 3).read().int().tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 1]]


def test_it_must_not_be_edited(rows: dict[str, Tensor]) -> None:
    found = by_rows(torch.neg, stored(rows["values"], rows["lengths"]), dtype=torch.float32)
    with pytest.raises(RuntimeError, match="edit a copy"):
        found.add_(1.0)
    assert np.array_equal(found.shape, (B, T))
