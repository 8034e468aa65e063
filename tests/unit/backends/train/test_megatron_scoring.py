"""Scores of tokens over a vocabulary in parts, in one process: the parts are then one, with filling behind it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

pytest.importorskip("megatron.core")

from posttrain.algos.fused_scoring import score_logits
from posttrain.backends.train.megatron.scoring import score_cut, score_top, top_of_cut

pytestmark = pytest.mark.slow  # megatron-core takes five seconds to import


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dist.ProcessGroup]:
    meeting: Path = tmp_path_factory.mktemp("meeting") / "here"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_by_hand(group: dist.ProcessGroup) -> None:
    # Logits 2 ln 3 and 0, at temperature 2: ln 3 and 0, so p = 3/4 and 1/4. log p = -0.2877; entropy 0.75 x 0.2877 + 0.25 x
    # 1.3863 = 0.5623; sum of squares 9/16 + 1/16 = 0.625. The third row is filling.
    weight = torch.tensor([[2 * torch.tensor(3.0).log()], [0.0], [0.0]])
    scores = score_cut(torch.ones(1, 1), weight, torch.tensor([0]), vocabulary=2, group=group, temperature=2.0)
    found = [float(each) for each in (scores.logprobs, scores.entropy, scores.sum_pi_squared) if each is not None]
    assert found == pytest.approx([-0.2877, 0.5623, 0.625], abs=1e-4)


def test_the_most_likely_tokens_by_hand(group: dist.ProcessGroup) -> None:
    # e^x = 1, 2, 5, of 8: the top two are 2 and 1, with p = 5/8 and 2/8; the first has p = 1/8. The last row is filling.
    weight = torch.tensor([[1.0], [2.0], [5.0], [99.0]]).log()
    cut: dict[str, Any] = {"vocabulary": 3, "group": group, "temperature": 1.0}
    top = top_of_cut(torch.ones(1, 1), weight, 2, **cut)
    assert top[0, 0].tolist() == [2, 1] and top[0, 1].exp().tolist() == pytest.approx([5 / 8, 2 / 8])
    # of the tokens below 2: 2/3 and 1/3
    known = top_of_cut(torch.ones(1, 1), weight, 2, **cut, known=2)
    assert known[0, 0].tolist() == [1, 0] and known[0, 1].exp().tolist() == pytest.approx([2 / 3, 1 / 3])
    hidden = torch.ones(1, 1, requires_grad=True)
    near, others = score_top(hidden, weight, torch.tensor([[2, 0]]), **cut)
    assert [*near.detach().exp()[0].tolist(), float(others.detach().exp())] == pytest.approx([5 / 8, 1 / 8, 2 / 8])
    # d log p_2 / dh = ln 5 - (ln 5 x 5/8 + ln 2 x 2/8); d log(others) / dh = ln 2 - the same mean
    mean = float(weight[2] * 5 / 8 + weight[1] * 2 / 8)
    (near[0, 0] + 10 * others[0, 0]).backward()
    assert hidden.grad is not None
    assert float(hidden.grad) == pytest.approx(float(weight[2] + 10 * weight[1]) - 11 * mean)


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_as_the_plain_formulas_with_gradients(group: dist.ProcessGroup, entropy_gradient: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 8, generator=generator) for size in (5, 11))
    targets = torch.tensor([0, 10, 3, 3, 7])
    filled = torch.cat([weight, torch.zeros(3, 8)])  # what filling holds must not count

    def gradients(cut: bool) -> tuple[Tensor, ...]:
        h, w = hidden.clone().requires_grad_(), (filled if cut else weight).clone().requires_grad_()
        if cut:
            scores = score_cut(
                h, w, targets, vocabulary=11, group=group, temperature=0.7, entropy_gradient=entropy_gradient
            )
        else:
            scores = score_logits(h @ w.T, targets, temperature=0.7, entropy_gradient=entropy_gradient)
        weights = torch.arange(1.0, 6.0)
        (weights * (scores.logprobs + (scores.entropy if entropy_gradient else 0.0))).sum().backward()
        assert h.grad is not None and w.grad is not None
        return scores.logprobs.detach(), scores.entropy.detach(), h.grad, w.grad[:11]

    for mine, theirs in zip(gradients(True), gradients(False), strict=True):
        assert_close(mine, theirs)


def test_a_state_that_is_not_finite_is_seen(group: dist.ProcessGroup) -> None:
    hidden = torch.full((1, 2), torch.nan)
    scores = score_cut(hidden, torch.ones(3, 2), torch.tensor([1]), vocabulary=3, group=group, temperature=1.0)
    assert scores.logprobs.isnan().all()
