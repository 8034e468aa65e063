"""What holds for every policy loss, KL estimate, aggregation and the value loss, on any batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posttrain.algos.kl import token_kl
from posttrain.algos.logprobs import entropy, log_probabilities
from posttrain.algos.objective import aggregate
from posttrain.algos.value_loss import value_loss
from posttrain.config.algorithm import Aggregation
from posttrain.records.batches import LossCounts
from posttrain.registry import POLICY_LOSSES

# Other values than the defaults where these would make a test empty; other settings keep theirs.
NUMBERS = {
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.28,
    "dual_clip": 1.5,
    "gate_sharpness_positive": 1.0,
    "gate_sharpness_negative": 1.05,
    "covariance_share": 1.0,  # all candidates: no draw, so the order of rows cannot matter
    "covariance_low": 0.1,
    "covariance_high": 5.0,
    "covariance_kl_coef": 0.5,
    "weight_limit": 3.0,
    "dro_beta": 0.5,
    "drop_clipped": True,
    "positive_weight": 1.5,
    "negative_weight": 0.5,
}
AGGREGATIONS = get_args(Aggregation)
ESTIMATORS = ("k1", "abs", "k2", "k3", "k1+", "abs+", "k3+")

# policy, old, advantages, mask -> loss per token [B, T]
TokenLoss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def policy_loss(name: str) -> TokenLoss:
    def compute(policy: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        loss = POLICY_LOSSES.get(name)
        tensors: dict[str, Any] = {"policy_logprobs": policy, "old_logprobs": old, "rollout_logprobs": old}
        tensors["advantages"] = advantages
        tensors |= {"mask": mask, "scores": torch.where(mask, advantages, 0.0).sum(dim=1)}
        tensors["mini_batch_tokens"] = int(mask.sum())
        tensors["chosen"] = None  # all of the mini-batch is here
        settings = POLICY_LOSSES.settings(name)
        token_loss, report = loss(
            *(tensors[tensor] for tensor in POLICY_LOSSES.inputs(name)),
            **{key: NUMBERS.get(key, setting.example()) for key, setting in settings.items()},
        )
        for logged in report.values():
            assert logged.shape == mask.shape and not logged.requires_grad
            assert logged[mask].isfinite().all()
        return token_loss

    return compute


def kl(estimator: str) -> TokenLoss:
    return lambda policy, old, advantages, mask: token_kl(estimator, policy, old, mask)


def critic(policy: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return value_loss(policy, old, advantages, mask, value_clip=0.5)[0]


LOSSES: dict[str, TokenLoss] = {
    **{name: policy_loss(name) for name in POLICY_LOSSES.names()},
    **{f"kl {estimator}": kl(estimator) for estimator in ESTIMATORS},
    "value": critic,
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """policy, old, advantages (all float64) and a mask with holes and empty rows; up to 5 rows of up to 5 tokens."""
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    old = -torch.rand(rows, width, generator=generator, dtype=torch.float64) * 3 - 0.1
    move = draw(st.sampled_from([0.0, 0.1, 1.0])) * torch.randn(old.shape, generator=generator, dtype=torch.float64)
    advantages = torch.randn(old.shape, generator=generator, dtype=torch.float64)
    if draw(st.booleans()):
        advantages = advantages[:, :1].expand(old.shape)
    mask = torch.rand(old.shape, generator=generator) < 0.7
    return (old + move).clamp(max=-0.01), old, advantages, mask


def value_and_gradient(loss: TokenLoss, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    policy, *others = batch
    policy = policy.clone().requires_grad_()
    token_loss = loss(policy, *others)
    return token_loss.detach(), torch.autograd.grad(token_loss.sum(), policy)[0]


def same(left: Tensor, right: Tensor, what: str = "") -> None:
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12, msg=lambda text: f"{what} {text}")


@every_loss
@settings(max_examples=25)
@given(batch=batches(), garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e4]))
def test_garbage_behind_the_mask_reaches_neither_value_nor_gradient(
    loss: TokenLoss, batch: tuple[Tensor, ...], garbage: float
) -> None:
    *tensors, mask = batch
    dirty = (*(torch.where(mask, tensor, garbage) for tensor in tensors), mask)
    value, gradient = value_and_gradient(loss, dirty)
    clean_value, clean_gradient = value_and_gradient(loss, batch)
    assert torch.equal(value, clean_value) and torch.equal(gradient, clean_gradient)
    assert value.isfinite().all() and gradient.isfinite().all()
    assert (value[~mask] == 0).all() and (gradient[~mask] == 0).all()


@every_loss
@settings(max_examples=25)
@given(batch=batches(), seed=st.integers(0, 100))
def test_row_order_and_padding_do_not_matter(loss: TokenLoss, batch: tuple[Tensor, ...], seed: int) -> None:
    order = torch.randperm(len(batch[0]), generator=torch.Generator().manual_seed(seed))
    changed = tuple(torch.nn.functional.pad(tensor[order], (0, 2)) for tensor in batch)
    width = batch[0].shape[1]
    for whole, moved in zip(value_and_gradient(loss, batch), value_and_gradient(loss, changed), strict=True):
        same(moved[:, :width], whole[order])
        assert (moved[:, width:] == 0).all()


@pytest.mark.parametrize("name", sorted(set(LOSSES) - set(POLICY_LOSSES.taking("mini_batch_tokens"))))
@settings(max_examples=10)
@given(batch=batches(), cut=st.integers(0, 5))
def test_parts_of_a_mini_batch_add_up_to_it(name: str, batch: tuple[Tensor, ...], cut: int) -> None:
    """However their tokens are averaged."""
    loss, mask = LOSSES[name], batch[3]
    groups = torch.arange(len(mask)) % 2
    prompt_tokens = {group: int(mask[groups == group].sum()) for group in (0, 1)}
    counts = LossCounts(
        tokens=int(mask.sum()),
        sequences=int(mask.any(dim=1).sum()),
        prompt_tokens={group: tokens for group, tokens in prompt_tokens.items() if tokens},
    )

    def shares(rows: slice) -> list[tuple[Tensor, Tensor]]:
        policy = batch[0][rows].clone().requires_grad_()
        token_loss = loss(policy, *(each[rows] for each in batch[1:]))
        parts = [
            aggregate(token_loss, mask[rows], mode, counts, norm_tokens=7, group_index=groups[rows])
            for mode in AGGREGATIONS
        ]
        return [(part.detach(), torch.autograd.grad(part, policy, retain_graph=True)[0]) for part in parts]

    every = zip(AGGREGATIONS, *map(shares, (slice(None), slice(cut), slice(cut, None))), strict=True)
    for mode, (whole, gradient), (first, first_gradient), (second, second_gradient) in every:
        same(first + second, whole, mode)
        same(torch.cat([first_gradient, second_gradient]), gradient, mode)


@every_loss
def test_nothing_to_learn_from_is_no_gradient_and_no_nan(loss: TokenLoss) -> None:
    garbage = torch.full((2, 3), math.nan)
    value, gradient = value_and_gradient(loss, (garbage, garbage, garbage, torch.zeros(2, 3).bool()))
    assert (value == 0).all() and (gradient == 0).all()


@every_loss
def test_gradients_are_the_numeric_ones(loss: TokenLoss, monkeypatch: pytest.MonkeyPatch) -> None:
    """Away from the kinks. Where a loss stops a gradient, the stopped value is a constant of the objective whose gradient is
    meant: it is noted at the point of interest, and kept when the numeric derivative moves away from there."""
    old = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -0.7, -3.0]], dtype=torch.float64)
    policy = old + torch.tensor([[0.1, 0.4, -0.15], [-0.4, 0.05, 0.6]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, 0.5, -2.0], [-0.3, 1.0, -1.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    plain, noted = torch.Tensor.detach, []
    monkeypatch.setattr(torch.Tensor, "detach", lambda tensor: noted.append(plain(tensor).clone()) or noted[-1])
    loss(policy, old, advantages, mask)
    monkeypatch.undo()

    def with_constants(policy: Tensor) -> Tensor:
        constants = iter(noted)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "detach", lambda tensor: next(constants))
            return loss(policy, old, advantages, mask)

    assert torch.autograd.gradcheck(with_constants, (policy.requires_grad_(),))


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_gradients_through_aggregation(mode: str) -> None:
    mask = torch.tensor([[True, True, False], [False, False, False], [True, False, False]])
    values = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    counts = LossCounts(tokens=3, sequences=2, prompt_tokens={0: 3})
    groups = torch.tensor([0, 1, 0])

    def total(values: Tensor) -> Tensor:
        return aggregate(values, mask, mode, counts, norm_tokens=5, group_index=groups)

    assert torch.autograd.gradcheck(total, (values,))


def test_gradients_through_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((3, 2), (4, 2)))
    hidden.requires_grad_()
    head.requires_grad_()
    assert torch.autograd.gradcheck(lambda h, w: entropy(log_probabilities(h @ w.T, 0.8)), (hidden, head))
