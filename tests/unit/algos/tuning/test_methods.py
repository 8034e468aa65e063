"""Tuning methods by hand, one pair or row at a time, and by their symmetries."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posttrain.algos.tuning.dpo import dpo
from posttrain.algos.tuning.kto import kto
from posttrain.algos.tuning.orpo import orpo
from posttrain.algos.tuning.reward_model import reward_model
from posttrain.algos.tuning.simpo import simpo

LN2 = math.log(2)
NATS = st.floats(min_value=-60, max_value=-0.01)


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def dpo_of(chosen: float, rejected: float, ref: tuple[float, float] = (0.0, 0.0), **how: Any) -> float:
    """The loss of a pair of 4 and 2 tokens."""
    losses, _ = dpo(t(chosen), t(rejected), t(ref[0]), t(ref[1]), t(4), t(2), **how)
    return float(losses)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        # h = (-6 + 8) - (-9 + 7) = 2 + 2 = 4, beta h = 2
        ({"beta": 0.5}, -math.log(sigmoid(2))),
        ({"beta": 0.5, "label_smoothing": 0.25}, -0.75 * math.log(sigmoid(2)) - 0.25 * math.log(sigmoid(-2))),
        (
            {"beta": 0.5, "label_smoothing": 0.25, "loss": "robust"},
            (-0.75 * math.log(sigmoid(2)) + 0.25 * math.log(sigmoid(-2))) / 0.5,
        ),
        ({"beta": 0.1, "loss": "hinge"}, 1 - 0.4),
        ({"beta": 0.5, "loss": "hinge"}, 0.0),  # 1 - 2 is below 0
        ({"beta": 0.5, "loss": "ipo"}, (4 - 1) ** 2),
        ({"beta": 0.5, "loss": "ipo", "per_token": True}, (2 / 4 + 2 / 2 - 1) ** 2),
        ({"beta": 0.5, "nll_coef": 2.0}, -math.log(sigmoid(2)) + 2 * 6 / 4),
    ],
)
def test_dpo_by_hand(how: dict[str, Any], expected: float) -> None:
    assert dpo_of(-6, -9, (-8, -7), **how) == pytest.approx(expected, rel=1e-12)


def test_dpo_rewards_are_log_ratios_times_beta() -> None:
    _, report = dpo(t(-6), t(-9), t(-8), t(-7), t(4), t(2), beta=0.5)
    assert report["rewards/chosen"].tolist() == [0.5 * 2]
    assert report["rewards/rejected"].tolist() == [0.5 * -2]


@pytest.mark.parametrize(
    ("how", "expected"),
    [({}, LN2), ({"label_smoothing": 0.3}, LN2), ({"loss": "hinge"}, 1.0), ({"loss": "ipo", "beta": 0.25}, 4.0)],
)
def test_dpo_of_a_policy_that_is_its_reference(how: dict[str, Any], expected: float) -> None:
    assert dpo_of(-6, -9, (-6, -9), **how) == pytest.approx(expected, rel=1e-12)


@given(NATS, NATS, NATS, NATS)
@settings(max_examples=30, deadline=None)
def test_dpo_with_half_the_labels_wrong_does_not_care_which_side_is_chosen(
    a: float, b: float, c: float, d: float
) -> None:
    half = {"label_smoothing": 0.5}
    assert dpo_of(a, b, (c, d), **half) == pytest.approx(dpo_of(b, a, (d, c), **half), rel=1e-9)


def test_dpo_gradient_by_hand() -> None:
    """d loss / d chosen = -beta sigma(-beta h), of rejected the opposite: with beta h = 2, -0.5 x 0.1192."""
    chosen, rejected = t(-6).requires_grad_(), t(-9).requires_grad_()
    dpo(chosen, rejected, t(-8), t(-7), t(4), t(2), beta=0.5)[0].sum().backward()
    assert chosen.grad is not None and rejected.grad is not None
    assert float(chosen.grad) == pytest.approx(-0.5 * sigmoid(-2), rel=1e-12)
    assert float(rejected.grad) == pytest.approx(0.5 * sigmoid(-2), rel=1e-12)


def test_kto_by_hand() -> None:
    """beta 0.5 and KL 2: z = 1. Rewards 0.5 x (-3 + 7) = 2 and 0.5 x (-9 + 7) = -1."""
    losses, report = kto(
        t(-3, -9),
        t(-7, -7),
        torch.tensor([True, False]),
        t(2)[0],
        beta=0.5,
        desirable_weight=1.5,
        undesirable_weight=0.5,
    )
    assert losses.tolist() == pytest.approx([1.5 * (1 - sigmoid(2 - 1)), 0.5 * (1 - sigmoid(1 + 1))])
    assert report["rewards/chosen"][0] == 2 and report["rewards/chosen"][1].isnan()
    assert report["rewards/rejected"][1] == -1 and report["rewards/rejected"][0].isnan()


def test_kto_of_a_policy_that_is_its_reference_is_one_half_of_the_weight() -> None:
    losses, _ = kto(t(-3, -9), t(-3, -9), torch.tensor([True, False]), t(0)[0], undesirable_weight=3.0)
    assert losses.tolist() == [0.5, 1.5]


def test_kto_without_a_reference_point_leaves_the_kl_out() -> None:
    losses, _ = kto(t(-3), t(-7), torch.tensor([True]), t(50)[0], beta=0.5, reference_point="zero")
    assert float(losses) == pytest.approx(1 - sigmoid(2))


def test_orpo_by_hand() -> None:
    """Mean probabilities 1/2 and 1/5: odds 1 and 1/4, so the log odds ratio is ln 4."""
    losses, report = orpo(t(4 * math.log(1 / 2)), t(2 * math.log(1 / 5)), t(4), t(2), beta=0.3)
    assert float(report["log_odds_chosen"]) == pytest.approx(math.log(4))
    assert float(losses) == pytest.approx(LN2 - 0.3 * math.log(sigmoid(math.log(4))))


def test_orpo_of_a_certain_completion_is_finite() -> None:
    losses, _ = orpo(t(0.0), t(-5.0), t(4), t(2))
    assert torch.isfinite(losses).all()


def test_simpo_by_hand() -> None:
    """Means -6 / 4 and -9 / 2: 2 x 3 - 1 = 5."""
    losses, _ = simpo(t(-6), t(-9), t(4), t(2), beta=2.0, gamma=1.0)
    assert float(losses) == pytest.approx(-math.log(sigmoid(5)), rel=1e-9)
    assert float(simpo(t(-6), t(-3), t(4), t(2), gamma=1.0)[0]) == pytest.approx(math.log(1 + math.e))
    assert float(simpo(t(-6), t(-9), t(4), t(2), loss="hinge", gamma=5.5, nll_coef=2.0)[0]) == pytest.approx(0.5 + 3)


def test_reward_model_by_hand() -> None:
    losses, _ = reward_model(t(1.5, 2.0), t(0.5, 2.0), t(0.25, 0.0), center_coef=0.01)
    assert losses.tolist() == pytest.approx([-math.log(sigmoid(0.75)) + 0.01 * 4, LN2 + 0.01 * 16])
