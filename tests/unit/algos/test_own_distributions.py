"""Tokens drawn at temperatures of their own, or among some of the tokens."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.algos.fused_scoring import Head
from posttrain.algos.own_distributions import ROWS, head_logits, score_own
from posttrain.records.allowed_tokens import from_text, to_text


def test_numbers_by_hand() -> None:
    logits = torch.log(torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 4.0, 9.0, 16.0]]))
    allowed = torch.tensor([[True, True, False, False, True, True, True, True]])  # wider than the vocabulary
    found = score_own(
        logits, lambda rows: rows, torch.tensor([1, 3]), torch.tensor([1.0, 2.0]), torch.tensor([0, -1]), allowed
    )
    # Of the first two tokens, 2 of 1 + 2; at temperature 2, the root of 16 among the roots 1 + 2 + 3 + 4.
    assert found.logprobs.tolist() == pytest.approx([math.log(2 / 3), math.log(4 / 10)], abs=1e-6)
    entropies = [-sum(p * math.log(p) for p in of) for of in ((1 / 3, 2 / 3), (0.1, 0.2, 0.3, 0.4))]
    assert found.entropy.tolist() == pytest.approx(entropies, abs=1e-6)
    assert found.sum_pi_squared is not None
    assert found.sum_pi_squared.tolist() == pytest.approx([5 / 9, 0.3], abs=1e-6)


@pytest.mark.parametrize("entropy", [False, True])
def test_gradients_are_those_of_the_plain_formula_also_over_several_pieces(entropy: bool) -> None:
    torch.manual_seed(0)
    count, vocabulary = ROWS + 3, 11
    hidden = torch.randn(count, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocabulary, 5, dtype=torch.float64, requires_grad=True)
    head = Head(weight=weight, scale=0.5, softcap=3.0)
    allowed = torch.rand(2, vocabulary) < 0.5
    allowed[:, 0] = True
    which = torch.randint(-1, 2, (count,))
    temperatures = torch.rand(count, dtype=torch.float64) + 0.5
    targets = torch.zeros(count, dtype=torch.int64)
    found = score_own(
        hidden, lambda some: head_logits(some, head), targets, temperatures, which, allowed, entropy_gradient=entropy
    )
    (found.logprobs.sum() + 0.3 * found.entropy.sum()).backward()
    ours = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    total = torch.zeros((), dtype=torch.float64)
    for row in range(count):
        logits = 3.0 * torch.tanh(0.5 * (weight @ hidden[row]) / 3.0) / temperatures[row]
        kept = torch.arange(vocabulary) if which[row] < 0 else allowed[which[row]].nonzero()[:, 0]
        log_p = logits[kept].log_softmax(0)
        total = total + log_p[(kept == 0).nonzero()[0, 0]]
        total = total - 0.3 * (log_p.exp() * log_p).sum() if entropy else total
    total.backward()
    for one, other in zip(ours, (hidden.grad, weight.grad), strict=True):
        assert one is not None and other is not None
        torch.testing.assert_close(one, other)


def test_sets_as_texts() -> None:
    packed = bytes([0b00000101, 0b10000000])
    assert from_text(to_text(packed)).nonzero()[0].tolist() == [0, 2, 15]
