"""KL estimators, their control and the exact KL, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.algos.kl import importance_weighted, token_kl
from posttrain.algos.kl_control import next_kl_coef
from posttrain.algos.kl_full import vocabulary_kl
from posttrain.algos.kl_reward import penalize_kl
from posttrain.errors import ShapeError

LN2 = math.log(2)
YES = torch.tensor([[True]])


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [  # d = policy - ref = ln 2
        ("k1", LN2, 1.0),
        ("abs", LN2, 1.0),
        ("k2", LN2**2 / 2, LN2),  # 0.240227
        ("k3", 0.5 - 1 + LN2, 0.5),  # exp(-d) - 1 + d = 0.193147; gradient 1 - exp(-d)
        ("k1+", LN2, LN2),
        ("abs+", LN2, LN2),
        ("k3+", 0.5 - 1 + LN2, LN2),
    ],
)
def test_estimators_at_ln_2(estimator: str, value: float, gradient: float) -> None:
    policy = torch.tensor([[LN2 - 1]], dtype=torch.float64, requires_grad=True)
    kl = token_kl(estimator, policy, torch.tensor([[-1.0]], dtype=torch.float64), YES)
    assert kl.item() == pytest.approx(value)
    assert torch.autograd.grad(kl.sum(), policy)[0].item() == pytest.approx(gradient)


def test_the_estimates_average_to_the_kl_and_k2_has_its_gradient() -> None:
    # All three tokens of a vocabulary, weighted by the policy's probabilities: the expectation of k1 and k3 is the KL;
    # the expectation of k2's gradient is the KL's; that of k1's own gradient is 0.
    logits = torch.tensor([0.5, -1.0, 0.2], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.1, 0.3, -0.7], dtype=torch.float64).log_softmax(0)
    log_p = logits.log_softmax(0)
    exact = (log_p.exp() * (log_p - ref)).sum()
    weights = log_p.exp().detach()
    mask = torch.ones(1, 3).bool()
    expected = {name: (weights * token_kl(name, log_p[None], ref[None], mask)[0]).sum() for name in ("k1", "k2", "k3")}
    assert expected["k1"].item() == pytest.approx(exact.item())
    assert expected["k3"].item() == pytest.approx(exact.item())
    (true_gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(expected["k2"], logits, retain_graph=True)[0], true_gradient)
    torch.testing.assert_close(torch.autograd.grad(expected["k1"], logits)[0], torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("old", "value", "gradient"),
    [  # d = policy - ref = ln 2, k3 = exp(-d) - 1 + d = 0.193147; r k3, and its gradient r k3' + r k3 = r d
        (LN2 - 1, 0.193147, LN2),  # r = 1
        (-1.0, 2 * 0.193147, 2 * LN2),  # r = 2
    ],
)
def test_an_estimate_times_the_ratio(old: float, value: float, gradient: float) -> None:
    policy = torch.tensor([[LN2 - 1]], dtype=torch.float64, requires_grad=True)
    k3 = token_kl("k3", policy, torch.tensor([[-1.0]], dtype=torch.float64), YES)
    weighted = importance_weighted(k3, policy, torch.tensor([[old]], dtype=torch.float64), YES)
    assert weighted.item() == pytest.approx(value, abs=1e-6)
    assert torch.autograd.grad(weighted.sum(), policy)[0].item() == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_times_the_ratio_an_estimate_has_the_value_and_the_gradient_of_the_kl(estimator: str) -> None:
    """Averaged over what an old policy sampled, from which the policy has moved away."""
    logits = torch.tensor([0.5, -1.0, 0.2], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-0.3, 0.4, 0.9], dtype=torch.float64).log_softmax(0)
    ref = torch.tensor([0.1, 0.3, -0.7], dtype=torch.float64).log_softmax(0)
    mask, log_p = torch.ones(1, 3).bool(), logits.log_softmax(0)
    exact = (log_p.exp() * (log_p - ref)).sum()
    (true_gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    plain = token_kl(estimator, log_p[None], ref[None], mask)
    weighted = (old.exp() * importance_weighted(plain, log_p[None], old[None], mask)[0]).sum()
    assert weighted.item() == pytest.approx(exact.item())
    torch.testing.assert_close(torch.autograd.grad(weighted, logits, retain_graph=True)[0], true_gradient)
    unweighted = (old.exp() * plain[0]).sum()
    assert not torch.allclose(torch.autograd.grad(unweighted, logits)[0], true_gradient, atol=0.05)


def test_what_stands_behind_the_mask_has_no_part_in_the_weighted_estimate() -> None:
    policy = torch.tensor([[-1.0, math.nan]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    other = torch.tensor([[-1.0, math.inf]])
    weighted = importance_weighted(token_kl("k3", policy, other, mask), policy, other, mask)
    assert weighted.tolist() == [[0, 0]]
    assert torch.autograd.grad(weighted.sum(), policy)[0].tolist() == [[0, 0]]


def test_the_kl_of_the_controller_is_a_mean_over_responses_with_a_sampled_token() -> None:
    # k1 per row: (0.2 + 0.4) / 2 = 0.3; no token; 0.1. Their mean is 0.2; verl's, with a 0 for the second, 0.1333
    mask = torch.tensor([[True, True], [False, False], [True, False]])
    old = torch.tensor([[-1.0, -1.0], [5.0, 5.0], [-1.0, 9.0]])
    ref = old - torch.tensor([[0.2, 0.4], [7.0, 7.0], [0.1, 7.0]])
    kl = token_kl("k1", old, ref, mask)
    _, _, measured = penalize_kl(torch.zeros(3, 2), kl, mask, kl_coef=1.0)
    assert measured == pytest.approx(0.2)
    _, _, measured = penalize_kl(torch.zeros(1, 2), kl[1:2], mask[1:2], kl_coef=1.0)
    assert measured == 0.0


def test_one_wild_token_is_bounded() -> None:
    kl = token_kl("k3", torch.tensor([[-300.0]]), torch.tensor([[0.0]]), YES)
    assert kl.item() == 10.0


def test_unknown_estimator_and_shapes() -> None:
    with pytest.raises(KeyError):
        token_kl("k4", torch.zeros(1, 1), torch.zeros(1, 1), YES)
    with pytest.raises(ShapeError, match="ref_logprobs"):
        token_kl("k1", torch.zeros(1, 1), torch.zeros(1, 2), YES)


def test_full_kl_by_hand() -> None:
    # p = (3/4, 1/4), q = (1/2, 1/2): 0.75 ln 1.5 + 0.25 ln 0.5 = 0.304099 - 0.173287 = 0.130812
    p, q = torch.tensor([[0.75, 0.25]]), torch.tensor([[0.5, 0.5]])
    assert vocabulary_kl(p.log(), q.log()).item() == pytest.approx(0.130812, abs=1e-6)


def test_full_kl_ignores_what_the_policy_forbids() -> None:
    # p = (1, 0), q = (1/2, 1/2): ln 2. Both forbid the third token.
    p, q = torch.tensor([[1.0, 0.0, 0.0]]).log(), torch.tensor([[0.5, 0.5, 0.0]]).log()
    p.requires_grad_()
    kl = vocabulary_kl(p, q)
    assert kl.item() == pytest.approx(LN2)
    assert torch.autograd.grad(kl.sum(), p)[0].isfinite().all()


def test_kl_coefficient_moves_at_most_a_fifth_per_horizon() -> None:
    # kl / target - 1 = 4, clipped to 0.2: 0.2 x (1 + 0.2 x 64 / 10000) = 0.200256
    assert next_kl_coef(0.2, 0.5, 64, target_kl=0.1, horizon=10_000) == pytest.approx(0.200256)
    # 0.05 / 0.1 - 1 = -0.5, clipped to -0.2
    assert next_kl_coef(0.2, 0.05, 64, target_kl=0.1, horizon=10_000) == pytest.approx(0.199744)
    assert next_kl_coef(0.2, 0.5, 64, target_kl=None) == 0.2


def test_kl_in_the_reward_by_hand() -> None:
    # d = 0.5 and 1.0 in row 0, 2.0 in row 1 (whose second token is masked): 1 - 0.1 x 0.5, 0 - 0.1 x 1, 3 - 0.1 x 2
    # mean of row means: (0.75 + 2) / 2 = 1.375; row 2 has no token and does not count
    old = torch.tensor([[0.5, 1.0], [2.0, math.nan], [9.0, 9.0]])
    rewards, _, kl = penalize_kl(
        torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 0.0]]),
        old,  # k1 to log-probs of 0
        torch.tensor([[True, True], [True, False], [False, False]]),
        kl_coef=0.1,
    )
    assert rewards.flatten().tolist() == pytest.approx([0.95, -0.1, 2.8, 0.0, 0.0, 0.0])
    assert kl == pytest.approx(1.375)
