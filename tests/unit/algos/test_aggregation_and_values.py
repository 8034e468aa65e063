"""Aggregation, the critic's loss, log-probs, entropy and schedules, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.algos import schedules
from posttrain.algos.logprobs import entropy, log_probabilities, sum_pi_squared, token_logprobs
from posttrain.algos.objective import aggregate
from posttrain.algos.value_loss import value_loss
from posttrain.errors import ShapeError
from posttrain.records.batches import LossCounts

VALUES = torch.tensor([[1.0, 2.0, math.nan], [4.0, math.inf, 1e4], [7.0, 7.0, 7.0]])
MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
COUNTS = LossCounts(tokens=3, sequences=2)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", 7 / 3),  # (1 + 2 + 4) / 3
        ("token_sum", 7.0),
        ("sequence_mean_token_mean", 2.75),  # (1.5 + 4) / 2; the third row has no token
        ("sequence_mean_token_sum", 3.5),  # (3 + 4) / 2
    ],
)
def test_aggregation_modes(mode: str, expected: float) -> None:
    assert aggregate(VALUES, MASK, mode, COUNTS).item() == pytest.approx(expected)
    assert aggregate(VALUES, MASK & False, mode, LossCounts(tokens=0, sequences=0)).item() == 0.0


def test_aggregation_by_an_unknown_name_or_shape() -> None:
    with pytest.raises(KeyError, match="median"):
        aggregate(VALUES, MASK, "median", COUNTS)
    with pytest.raises(ShapeError, match=r"mask \[3, 1\]"):
        aggregate(VALUES, MASK[:, :1], "token_mean", COUNTS)


def test_value_loss_takes_the_worse_of_free_and_clipped() -> None:
    # R = 1, v_old = 0, clip 0.2. v = 0.5: free 0.25, clipped v 0.2: 0.64 is larger: 0.32, no gradient.
    # v = 3: free 4, clipped 0.64: 2, gradient v - R = 2. v = 0.1 lies in the range: 0.81 / 2, gradient -0.9.
    values = torch.tensor([[0.5, 3.0, 0.1]], dtype=torch.float64, requires_grad=True)
    old, returns = torch.zeros(1, 3, dtype=torch.float64), torch.ones(1, 3, dtype=torch.float64)
    loss, report = value_loss(values, old, returns, torch.ones(1, 3).bool(), value_clip=0.2)
    assert loss.tolist()[0] == pytest.approx([0.32, 2.0, 0.405])
    assert torch.autograd.grad(loss.sum(), values)[0].tolist()[0] == pytest.approx([0.0, 2.0, -0.9])
    assert report["value_clip_fraction"].tolist() == [[1, 0, 0]]


def test_value_loss_without_clip() -> None:
    # (3 - 1)^2 / 2 = 2
    loss, _ = value_loss(
        torch.tensor([[3.0]]), torch.tensor([[0.0]]), torch.tensor([[1.0]]), torch.tensor([[True]]), value_clip=None
    )
    assert loss.tolist() == [[2.0]]


def test_log_probs_and_entropy_of_three_to_one() -> None:
    # logits ln 3 and 0: probabilities 3/4, 1/4; entropy 0.75 ln(4/3) + 0.25 ln 4 = 0.562335; 9/16 + 1/16 = 0.625
    scores = log_probabilities(torch.tensor([[math.log(3), 0.0]]), temperature=1.0)
    assert token_logprobs(scores, torch.tensor([1])).item() == pytest.approx(math.log(0.25))
    assert entropy(scores).item() == pytest.approx(0.562335, abs=1e-6)
    assert sum_pi_squared(scores).item() == pytest.approx(0.625)


def test_temperature_divides_the_logits_and_half_precision_is_raised() -> None:
    # temperature 0.5: logits 2 ln 3 = ln 9: probabilities 9/10, 1/10
    scores = log_probabilities(torch.tensor([[math.log(3), 0.0]], dtype=torch.float64), temperature=0.5)
    assert scores.exp()[0].tolist() == pytest.approx([0.9, 0.1])
    assert log_probabilities(torch.zeros(1, 2, dtype=torch.bfloat16), 1.0).dtype == torch.float32


def test_a_forbidden_token_has_no_entropy_and_no_gradient() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    total = entropy(log_probabilities(logits, 1.0)).sum()
    assert total.item() == pytest.approx(math.log(2))
    assert torch.autograd.grad(total, logits)[0].tolist()[0] == pytest.approx([0.0, 0.0, 0.0])


def test_cosine_by_hand_and_after_its_end() -> None:
    # 2 updates of warm-up, then half a cosine over 8, floor 0.1: in the middle 0.1 + 0.9 / 2 = 0.55
    def factor(update: int) -> float:
        return schedules.cosine(update, warmup_updates=2, total_updates=10, min_lr_ratio=0.1)

    assert [factor(update) for update in (0, 1, 2, 6, 10, 11, 1000)] == pytest.approx([0, 0.5, 1, 0.55, 0.1, 0.1, 0.1])


def test_a_schedule_without_warm_up_starts_at_the_peak() -> None:
    assert schedules.constant(0, warmup_updates=0) == 1.0
    assert schedules.cosine(0, warmup_updates=0, total_updates=1, min_lr_ratio=0.0) == 1.0


def test_linear_by_hand() -> None:
    # 2 updates of warm-up, then from 1 to 0.2 over 8: in the middle 1 - 0.8 / 2 = 0.6
    def factor(update: int) -> float:
        return schedules.linear(update, warmup_updates=2, total_updates=10, min_lr_ratio=0.2)

    assert [factor(update) for update in (0, 1, 2, 6, 10, 99)] == pytest.approx([0, 0.5, 1, 0.6, 0.2, 0.2])


@pytest.mark.parametrize("stable_ratio", [0.0, 0.5, 1.0])
def test_warmup_stable_decay_is_at_its_floor_from_the_last_update_on(stable_ratio: float) -> None:
    for update in (10, 11, 50):
        assert schedules.warmup_stable_decay(
            update, warmup_updates=2, total_updates=10, min_lr_ratio=0.1, stable_ratio=stable_ratio
        ) == pytest.approx(0.1)


def test_warmup_stable_decay_by_hand() -> None:
    # 1 of 11 updates warms up; half of the other 10 stay at 1 (to update 6); then half a cosine over 5 to 0.1: after 2.5
    # of them it would be 0.55; at 8 (2 of 5): 0.1 + 0.9 x (1 + cos(0.4 pi)) / 2 = 0.1 + 0.9 x 0.654508 = 0.689058
    def factor(update: int) -> float:
        return schedules.warmup_stable_decay(
            update, warmup_updates=1, total_updates=11, min_lr_ratio=0.1, stable_ratio=0.5
        )

    assert [factor(u) for u in (0, 1, 5, 6, 8, 11, 99)] == pytest.approx([0, 1, 1, 1, 0.689058, 0.1, 0.1])


def test_inverse_square_root_by_hand() -> None:
    # w = 4: at 16 sqrt(4 / 16) = 0.5
    def factors(updates: tuple[int, ...], warmup: int, **more: float) -> list[float]:
        return [
            schedules.inverse_square_root(update, warmup_updates=warmup, total_updates=30, **more) for update in updates
        ]

    assert factors((0, 2, 4, 16, 400), 4) == pytest.approx([0, 0.5, 1, 0.5, 0.1])
    assert factors((0, 1, 4), 0) == [1, 1, 0.5]
    # a floor of 0.6 holds from where the root falls below it, and after the last update
    assert factors((4, 9, 16, 31), 4, min_lr_ratio=0.6) == pytest.approx([1, 2 / 3, 0.6, 0.6])
