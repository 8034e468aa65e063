"""Divergences of a student from its teacher: by hand, by their properties, and fused as by plain autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from posttrain.algos import fused_divergence
from posttrain.algos.distillation import Comparison, compare, compare_top
from posttrain.algos.distilled_tokens import sampled_divergence
from posttrain.algos.fused_divergence import TeacherStates, TopTokens, score_divergence, top_tokens
from posttrain.algos.fused_scoring import Head
from posttrain.errors import ShapeError
from posttrain.records.batches import TeacherScores
from posttrain.records.plans import DistillationPlan
from posttrain.registry import DIVERGENCES

OVER_THE_VOCABULARY = [name for name in DIVERGENCES.names() if not DIVERGENCES.facts(name).of_sampled_tokens]
P, Q = (0.75, 0.25), (0.5, 0.5)  # student, teacher


def measure(name: str, **settings: float) -> Callable[[Tensor, Tensor], Tensor]:
    return partial(DIVERGENCES.get(name), **settings)


def logs(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("forward_kl", {}, 0.143841),  # 0.5 ln(0.5 / 0.75) + 0.5 ln(0.5 / 0.25) = -0.202733 + 0.346574
        ("reverse_kl", {}, 0.130812),  # 0.75 ln 1.5 + 0.25 ln 0.5 = 0.304099 - 0.173287
        # m = (0.625, 0.375); KL(q || m) = 0.5 (ln 0.8 + ln 4/3) = 0.032269, KL(p || m) = 0.75 ln 1.2 + 0.25 ln 2/3 = 0.035375
        ("jensen_shannon", {}, 0.033822),
        # m = 0.2 q + 0.8 p = (0.7, 0.3); 0.2 x (0.5 ln 5/7 + 0.5 ln 5/3) + 0.8 x (0.75 ln 15/14 + 0.25 ln 5/6)
        ("jensen_shannon", {"beta": 0.2}, 0.022367),
        (
            "skewed_forward_kl",
            {},
            0.113137,
        ),  # m = 0.1 q + 0.9 p = (0.725, 0.275); 0.5 ln(0.5 / 0.725) + 0.5 ln(0.5 / 0.275)
        ("skewed_reverse_kl", {}, 0.107043),  # m = (0.525, 0.475); 0.75 ln(0.75 / 0.525) + 0.25 ln(0.25 / 0.475)
    ],
)
def test_by_hand(name: str, settings: dict[str, float], expected: float) -> None:
    assert measure(name, **settings)(logs(*P), logs(*Q)).item() == pytest.approx(expected, abs=1e-6)


def test_adaptive_by_hand() -> None:
    # Teacher (0.6, 0.3, 0.1): the tail up to a mass of 0.5 is 0.1 and 0.3. Gaps to (0.5, 0.45, 0.05): head 0.1, tail 0.2, so
    # w = 1/3. Forward 0.6 ln 1.2 + 0.3 ln 2/3 + 0.1 ln 2 = 0.057068, reverse 0.5 ln 5/6 + 0.45 ln 1.5 + 0.05 ln 0.5 = 0.056641.
    found = measure("adaptive_kl", alpha=0.5)(logs(0.5, 0.45, 0.05), logs(0.6, 0.3, 0.1))
    assert found.item() == pytest.approx(0.057068 / 3 + 0.056641 * 2 / 3, abs=1e-6)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", OVER_THE_VOCABULARY)
@pytest.mark.parametrize("top_k", [None, 4])
@pytest.mark.parametrize("rest", ["bucket", "renormalize", "drop"])
def test_equal_models_are_no_distance_apart_and_others_are(name: str, top_k: int | None, rest: str) -> None:
    how = Comparison(divergence=measure(name), top_k=top_k, rest=rest)
    logits = draw(5, 9).requires_grad_()
    same = compare(logits, logits.detach() + 3.0, how)  # a shift of all logits changes no distribution
    assert same.abs().max() < 1e-12
    other = compare(draw(5, 9, seed=1), logits.detach(), how)
    assert (other > 0).all() or rest == "drop"  # of parts of distributions, which may be 0
    assert (other >= 0).all()


def test_jensen_shannon_is_symmetric_at_one_half_bounded_and_tends_to_both_kl() -> None:
    p, q = (draw(6, 9, seed=seed).log_softmax(-1) for seed in (1, 2))
    half = measure("jensen_shannon", beta=0.5)
    assert torch.allclose(half(p, q), half(q, p))
    assert half(logs(1 - 1e-12, 1e-12), logs(1e-12, 1 - 1e-12)).item() == pytest.approx(math.log(2), abs=1e-9)
    assert torch.allclose(measure("jensen_shannon", beta=0.3)(p, q), measure("jensen_shannon", beta=0.7)(q, p))
    near = 1e-6
    assert torch.allclose(
        measure("jensen_shannon", beta=near)(p, q) / near, measure("forward_kl")(p, q), rtol=1e-4, atol=1e-4
    )
    assert torch.allclose(
        measure("jensen_shannon", beta=1 - near)(p, q) / near, measure("reverse_kl")(p, q), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("skewed", "plain"), [("skewed_forward_kl", "forward_kl"), ("skewed_reverse_kl", "reverse_kl")]
)
def test_without_skew_it_is_the_plain_divergence(skewed: str, plain: str) -> None:
    p, q = draw(6, 9, seed=1).log_softmax(-1), draw(6, 9, seed=2).log_softmax(-1)
    assert torch.equal(measure(skewed, skew=0.0)(p, q), measure(plain)(p, q))
    assert (measure(skewed, skew=0.5)(p, q) < measure(plain)(p, q)).all()


def test_a_token_that_only_one_of_them_forbids() -> None:
    p, q = logs(0.5, 0.5, 0.0), logs(0.5, 0.25, 0.25)
    assert measure("forward_kl")(p, q).item() == math.inf
    assert measure("reverse_kl")(p, q).item() == pytest.approx(0.5 * math.log(2))
    assert math.isfinite(measure("skewed_forward_kl")(p, q).item())
    assert math.isfinite(measure("jensen_shannon")(p, q).item())


@pytest.mark.parametrize("name", OVER_THE_VOCABULARY)
@pytest.mark.parametrize("rest", ["bucket", "renormalize", "drop"])
def test_a_growing_top_k_ends_at_the_whole_vocabulary(name: str, rest: str) -> None:
    student, teacher = draw(7, 11, seed=1), draw(7, 11, seed=2)
    whole = compare(student, teacher, Comparison(divergence=measure(name)))
    found = [compare(student, teacher, Comparison(divergence=measure(name), top_k=k, rest=rest)) for k in range(1, 12)]
    assert torch.allclose(found[-1], whole, atol=1e-7)
    if rest == "bucket" and name not in ("adaptive_kl", "skewed_forward_kl", "skewed_reverse_kl"):
        # Tokens taken together can only hide a difference.
        for smaller, larger in pairwise(found):
            assert (smaller <= larger + 1e-12).all()


def test_the_top_two_by_hand() -> None:
    # Teacher (0.5, 0.3, 0.2), student (0.2, 0.3, 0.5), forward KL over tokens 0 and 1.
    student, teacher = logs(0.2, 0.3, 0.5), logs(0.5, 0.3, 0.2)

    def of(rest: str, **more: float) -> float:
        return compare(
            student, teacher, Comparison(divergence=measure("forward_kl"), top_k=2, rest=rest, **more)
        ).item()

    # One token for the rest: 0.5 ln 2.5 + 0.3 ln 1 + 0.2 ln 0.4 = 0.458145 - 0.183258
    assert of("bucket") == pytest.approx(0.274887, abs=1e-6)
    # (0.625, 0.375) against (0.4, 0.6): 0.625 ln 1.5625 + 0.375 ln 0.625 = 0.278929 - 0.176251
    assert of("renormalize") == pytest.approx(0.102678, abs=1e-6)
    assert of("drop") == pytest.approx(0.458145, abs=1e-6)
    # ln 0.2 counts as -1, ln 0.5 stays: 0.5 (-0.693147 + 1) + e^-1 (-1 + 1)
    assert of("drop", min_logprob=-1.0) == pytest.approx(0.153426, abs=1e-6)
    # The other way round the sum over the top two is negative: (0.2 ln 0.4 + 0.3 ln 1) < 0
    assert compare(teacher, student, Comparison(divergence=measure("forward_kl"), top_k=1, rest="drop")).item() > 0
    wrong = Comparison(divergence=measure("reverse_kl"), top_k=2, rest="drop")
    assert compare(student, teacher, wrong).item() == 0  # 0.2 ln 0.4 = -0.18 counts as 0


def test_temperatures_divide_logits() -> None:
    student, teacher = draw(3, 9, seed=1), draw(3, 9, seed=2)
    found = compare(
        student, teacher, Comparison(divergence=measure("forward_kl"), temperature=2.0, teacher_temperature=0.5)
    )
    assert torch.allclose(found, compare(student / 2, teacher, Comparison(divergence=measure("forward_kl"))))


def test_more_than_the_vocabulary_is_refused() -> None:
    with pytest.raises(ShapeError, match="the top 10 of a vocabulary of 9 tokens"):
        compare(draw(2, 9), draw(2, 9), Comparison(divergence=measure("forward_kl"), top_k=10))


@pytest.mark.parametrize("name", OVER_THE_VOCABULARY)
@pytest.mark.parametrize("form", ["plain", "softcap"])
@pytest.mark.parametrize("top_k", [None, 3])
def test_fused_values_and_gradients_are_those_of_plain_autograd(
    name: str, form: str, top_k: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Blocks of three rows of 11 logits in parts of two: the last ones are smaller.
    monkeypatch.setattr(fused_divergence, "BLOCK_VALUES", 33)
    monkeypatch.setattr(fused_divergence, "PART_VALUES_CPU", 22)
    options = {"softcap": 2.0, "scale": 0.5} if form == "softcap" else {}
    hidden, weight, bias = (
        draw(7, 4).requires_grad_(),
        draw(11, 4, seed=3).requires_grad_(),
        draw(11, seed=5).requires_grad_(),
    )
    head = Head(weight=weight, bias=bias, **options)
    theirs, their_head = draw(7, 6, seed=1), Head(weight=draw(11, 6, seed=2))
    how = Comparison(divergence=measure(name), temperature=1.3, teacher_temperature=0.8, top_k=top_k)
    teacher: TeacherStates | TopTokens = TeacherStates(hidden=theirs, head=their_head)
    if top_k:
        top = (theirs @ their_head.weight.T / (1.3 * 0.8)).log_softmax(-1).topk(top_k)
        teacher = TopTokens(ids=top.indices, logprobs=top.values)
    weights = draw(7, seed=4)
    fused = score_divergence(hidden, head, teacher, how)
    fused_gradients = torch.autograd.grad((fused * weights).sum(), [hidden, weight, bias])
    logits = head.scale * (hidden @ weight.T + bias)
    logits = logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)
    plain = compare(logits, theirs @ their_head.weight.T, how)
    assert torch.allclose(fused, plain, atol=1e-10)
    for found, expected in zip(
        fused_gradients, torch.autograd.grad((plain * weights).sum(), [hidden, weight, bias]), strict=True
    ):
        assert torch.allclose(found, expected, atol=1e-8)


def test_padding_of_the_larger_vocabulary_is_left_out() -> None:
    hidden, theirs = draw(4, 3), draw(4, 5, seed=1)
    weight, their_weight = draw(8, 3, seed=2), draw(11, 5, seed=3)
    how = Comparison(divergence=measure("reverse_kl"))
    found = score_divergence(
        hidden, Head(weight=weight), TeacherStates(hidden=theirs, head=Head(weight=their_weight)), how
    )
    assert torch.allclose(found, compare(hidden @ weight.T, theirs @ their_weight[:8].T, how))


def test_top_tokens_are_the_most_likely_and_not_renormalized() -> None:
    hidden, head = draw(4, 3), Head(weight=draw(9, 3, seed=1))
    found = top_tokens(hidden, head, 9, temperature=2.0)
    expected = (hidden @ head.weight.T / 2).log_softmax(-1)
    assert torch.allclose(expected.gather(1, found[:, 0].long()), found[:, 1].double(), atol=1e-6)
    assert (found[:, 1].diff(dim=1) <= 0).all()
    assert torch.allclose(found[:, 1].exp().sum(1), torch.ones(4), atol=1e-6)


def test_compare_top_leaves_other_tokens_their_part_of_the_softmax() -> None:
    # The student's log-probs are of the whole vocabulary, whatever the teacher's top k holds.
    found = compare_top(
        logs(0.2, 0.3, 0.5), torch.tensor([[0]]), logs(0.5), Comparison(divergence=measure("forward_kl"), rest="drop")
    )
    assert found.item() == pytest.approx(0.5 * math.log(2.5))


def test_sampled_divergence_is_the_weighted_sum_over_the_teachers_of_each_row() -> None:
    mask = torch.tensor([[True, True], [True, False]])
    policy = torch.tensor([[-1.0, -2.0], [-0.5, math.nan]])
    teachers = {
        "all": TeacherScores(rows=torch.tensor([True, True]), logprobs=torch.tensor([[-2.0, -1.5], [-0.5, 7.0]])),
        "second": TeacherScores(rows=torch.tensor([False, True]), logprobs=torch.tensor([[9.0, 9.0], [-9.5, 9.0]])),
    }
    plan = DistillationPlan(
        name="sampled_kl", of_sampled_tokens=True, teachers={"all": 2.0, "second": 0.5}, as_loss=False, clip=4.0
    )
    # k1: 2 x (-1 + 2), 2 x (-2 + 1.5); then 2 x 0 + 0.5 x (9, which is cut to 4); 0 where masked
    assert sampled_divergence(policy, teachers, mask, plan).tolist() == [[2.0, -1.0], [2.0, 0.0]]


def test_bfloat16_logits_are_not_rounded_on_the_way() -> None:
    """Of the same numbers in float64, to float32's rounding, over more tokens than a tile has."""
    hidden, weight = draw(3, 16).bfloat16(), draw(2500, 16, seed=1).bfloat16()
    theirs, their_weight = draw(3, 8, seed=2).bfloat16(), draw(2500, 8, seed=3).bfloat16()
    how = Comparison(divergence=measure("jensen_shannon"))
    found = score_divergence(
        hidden, Head(weight=weight), TeacherStates(hidden=theirs, head=Head(weight=their_weight)), how
    )
    plain = compare(hidden.double() @ weight.double().T, theirs.double() @ their_weight.double().T, how)
    assert found.dtype == torch.float32 and torch.allclose(found.double(), plain, rtol=1e-4)
