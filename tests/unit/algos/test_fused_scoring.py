"""Scores from hidden states, tile by tile over the vocabulary, are the plain formulas'; so are their gradients."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.algos import exact_products, fused_scoring
from posttrain.algos.fused_scoring import Head, TokenScores, score_logits, score_tokens
from posttrain.errors import ShapeError

N, H, REF_H, VOCABULARY = 7, 4, 3, 11
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.25},
    "softcap": {"softcap": 2.0},
    "all": {"bias": True, "scale": 1.7, "softcap": 3.0},
}


@pytest.fixture(params=[False, True], ids=["rounds", "widens"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor whose products of bfloat16 are fast, and on one where those of float32 are."""
    monkeypatch.setattr(exact_products, "multiplies_bfloat16_slowly", lambda: request.param)


@pytest.fixture(params=[3, 11, 2048], autouse=True)
def columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Four tiles, the last one narrower; one tile that fits exactly; one that is wider than the vocabulary."""
    monkeypatch.setattr(fused_scoring, "COLUMNS", request.param)
    return int(request.param)


def make(form: str, dtype: torch.dtype = torch.float64, tokens: int = N) -> tuple[Tensor, Head, Tensor, Tensor, Head]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    options = dict(FORMS[form])
    bias = draw(VOCABULARY).requires_grad_() if options.pop("bias", False) else None
    hidden, weight = draw(tokens, H).requires_grad_(), draw(VOCABULARY, H).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    reference = Head(weight=draw(VOCABULARY, REF_H), softcap=4.0)
    return hidden, Head(weight=weight, bias=bias, **options), targets, draw(tokens, REF_H), reference


def logits_of(hidden: Tensor, head: Head) -> Tensor:
    logits = head.scale * (hidden @ head.weight.T + (0 if head.bias is None else head.bias))
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def both(
    form: str, temperature: float, dtype: torch.dtype = torch.float64
) -> tuple[TokenScores, TokenScores, list[Tensor]]:
    """Fused scores, plain scores, and what gets gradient."""
    hidden, head, targets, ref_hidden, ref_head = make(form, dtype)
    fused = score_tokens(
        hidden,
        head,
        targets,
        temperature=temperature,
        entropy_gradient=True,
        sum_pi_squared=True,
        reference=(ref_hidden, ref_head),
    )
    plain = score_logits(
        logits_of(hidden, head),
        targets,
        temperature=temperature,
        entropy_gradient=True,
        sum_pi_squared=True,
        reference_logits=logits_of(ref_hidden, ref_head),
    )
    return fused, plain, [tensor for tensor in (hidden, head.weight, head.bias) if tensor is not None]


def test_by_hand() -> None:
    # hidden 1, weights (ln 3, 0): p = (3/4, 1/4). log p = ln 1/4; entropy ln 4 - 0.75 ln 3 = 0.562335; 9/16 + 1/16 = 0.625.
    # Against q = (1/2, 1/2): 0.75 ln 1.5 + 0.25 ln 0.5 = 0.130812.
    head = Head(weight=torch.tensor([[math.log(3)], [0.0]]))
    even = (torch.ones(1, 1), Head(weight=torch.zeros(2, 1)))
    scores = score_tokens(
        torch.ones(1, 1), head, torch.tensor([1]), temperature=1.0, sum_pi_squared=True, reference=even
    )
    assert scores.logprobs.item() == pytest.approx(math.log(0.25))
    assert scores.entropy.item() == pytest.approx(0.562335, abs=1e-6)
    assert scores.sum_pi_squared.item() == pytest.approx(0.625)
    assert scores.full_kl is not None and scores.full_kl.item() == pytest.approx(0.130812, abs=1e-6)
    # Temperature 1/2 doubles the logits: p = (9/10, 1/10).
    half = score_tokens(torch.ones(1, 1), head, torch.tensor([1]), temperature=0.5)
    assert half.logprobs.item() == pytest.approx(math.log(0.1))
    assert half.full_kl is None


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("form", FORMS)
def test_equal_to_the_plain_formulas_in_float64(form: str, temperature: float) -> None:
    fused, plain, leaves = both(form, temperature)
    for name in ("logprobs", "entropy", "sum_pi_squared", "full_kl"):
        torch.testing.assert_close(getattr(fused, name), getattr(plain, name), rtol=1e-12, atol=1e-12, msg=name)
    weights = torch.randn(3, N, dtype=torch.float64)

    def gradients(scores: TokenScores, *which: int) -> tuple[Tensor, ...]:
        outputs = [scores.logprobs, scores.entropy, scores.full_kl]
        total = sum((outputs[i] * weights[i]).sum() for i in which)
        return torch.autograd.grad(total, leaves, retain_graph=True)

    for which in ((0,), (1,), (2,), (0, 1, 2)):
        torch.testing.assert_close(gradients(fused, *which), gradients(plain, *which), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_the_numeric_ones(form: str) -> None:
    hidden, head, targets, ref_hidden, ref_head = make(form, tokens=3)
    biases = () if head.bias is None else (head.bias,)

    def scores(hidden: Tensor, weight: Tensor, *bias: Tensor) -> tuple[Tensor, ...]:
        mine = Head(weight=weight, bias=bias[0] if bias else None, scale=head.scale, softcap=head.softcap)
        found = score_tokens(
            hidden,
            mine,
            targets,
            temperature=0.8,
            entropy_gradient=True,
            sum_pi_squared=True,
            reference=(ref_hidden, ref_head),
        )
        assert found.full_kl is not None
        return found.logprobs, found.entropy, found.full_kl

    assert torch.autograd.gradcheck(scores, (hidden, head.weight, *biases))


def test_float32_agrees_with_float64_to_rounding() -> None:
    fused, _, leaves = both("all", 0.7, torch.float32)
    _, exact, wanted = both("all", 0.7)
    for name in ("logprobs", "entropy", "sum_pi_squared", "full_kl"):
        torch.testing.assert_close(getattr(fused, name).double(), getattr(exact, name), rtol=1e-6, atol=1e-6, msg=name)
    (fused.logprobs - 0.1 * fused.entropy).sum().backward()
    (exact.logprobs - 0.1 * exact.entropy).sum().backward()
    for mine, theirs in zip(leaves, wanted, strict=True):
        assert (mine.grad.double() - theirs.grad).norm() < 1e-6 * theirs.grad.norm()


@pytest.mark.usefixtures("both_ways")
def test_bfloat16_logits_beside_a_reference_are_not_rounded() -> None:
    """Scores of bfloat16 inputs are those of the same numbers in float64, to float32's rounding; only the gradients are
    bfloat16 (a relative rounding of 2^-9 each, added up over the tiles' parts: 1 % in norm)."""
    hidden, head, targets, ref_hidden, ref_head = make("plain", torch.bfloat16)
    fused = score_tokens(hidden, head, targets, temperature=0.7, sum_pi_squared=True, reference=(ref_hidden, ref_head))
    exact_hidden, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, head.weight))
    exact_reference = Head(weight=ref_head.weight.double(), softcap=ref_head.softcap)
    exact = score_logits(
        exact_hidden @ exact_weight.T,
        targets,
        temperature=0.7,
        sum_pi_squared=True,
        reference_logits=logits_of(ref_hidden.double(), exact_reference),
    )
    for name in ("logprobs", "entropy", "sum_pi_squared", "full_kl"):
        assert getattr(fused, name).dtype == torch.float32
        torch.testing.assert_close(getattr(fused, name).double(), getattr(exact, name), rtol=2e-6, atol=2e-6, msg=name)
    fused.logprobs.sum().backward()
    exact.logprobs.sum().backward()
    for mine, theirs in ((hidden, exact_hidden), (head.weight, exact_weight)):
        assert mine.grad.dtype == torch.bfloat16
        assert (mine.grad.double() - theirs.grad).norm() < 1e-2 * theirs.grad.norm()


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize(("scale", "temperature"), [(1.0, 1.0), (0.5, 0.8)])
def test_bfloat16_on_a_cpu_rounds_the_distance_to_the_target_only(scale: float, temperature: float) -> None:
    """A logit of 30 rounded to bfloat16 is off by up to 30 * 2^-9 = 0.06. Of tokens drawn from the distribution, what is off is
    what is far from them: so scores are off by less than a tenth of what they would be from rounded logits, with no bias."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(256, 64, generator=generator).bfloat16()
    weight = torch.randn(700, 64, generator=generator).bfloat16()
    factor = scale / temperature
    exact = (hidden.double() @ weight.double().T * factor).log_softmax(dim=1)
    targets = torch.multinomial(exact.exp(), 1, generator=generator)[:, 0]
    wanted = exact.gather(1, targets[:, None])[:, 0]
    rounded = ((hidden @ weight.T).double() * factor).log_softmax(dim=1).gather(1, targets[:, None])[:, 0]
    scores = score_tokens(hidden, Head(weight=weight, scale=scale), targets, temperature=temperature)
    error = scores.logprobs.double() - wanted
    assert error.abs().mean() < (rounded - wanted).abs().mean() / 10
    assert error.mean().abs() < 2e-4
    entropy = -(exact.exp() * exact).sum(dim=1)
    assert (scores.entropy.double() - entropy).abs().mean() < 2e-3


@pytest.mark.usefixtures("both_ways")
def test_bfloat16_scores_of_a_target_that_is_not_in_the_vocabulary() -> None:
    hidden, weight = torch.randn(3, 8).bfloat16(), torch.randn(20, 8).bfloat16()
    scores = score_tokens(hidden, Head(weight=weight), torch.tensor([-100, 20, 3]), temperature=1.0)
    assert scores.logprobs.isnan().tolist() == [True, True, False]
    assert scores.entropy.isfinite().all()


def test_certain_draws_keep_their_digits() -> None:
    # Logits (30, 0): log p of the first token is -ln(1 + e^-30) = -9.4e-14, its entropy 30 e^-30 = 2.8e-12 and a bit; and
    # never the wrong side of 0, whatever the size of the logits.
    head = Head(weight=torch.tensor([[30.0], [0.0]]))
    for size in (1.0, 100.0):
        scores = score_tokens(torch.full((1, 1), size), head, torch.tensor([0]), temperature=1.0, sum_pi_squared=True)
        assert -1e-12 < scores.logprobs.item() <= 0
        assert 0 <= scores.entropy.item() < 1e-11
        assert scores.sum_pi_squared.item() == pytest.approx(1.0)


def test_entropy_carries_gradient_only_when_asked_and_sum_pi_squared_never() -> None:
    hidden, head, targets, *_ = make("plain")
    scores = score_tokens(hidden, head, targets, temperature=1.0)
    assert scores.logprobs.requires_grad and not scores.entropy.requires_grad
    assert scores.sum_pi_squared is None
    scores = score_tokens(hidden, head, targets, temperature=1.0, sum_pi_squared=True)
    assert score_tokens(hidden, head, targets, temperature=1.0, entropy_gradient=True).entropy.requires_grad
    assert scores.sum_pi_squared is not None and not scores.sum_pi_squared.requires_grad
    with torch.no_grad():
        assert not score_tokens(hidden, head, targets, temperature=1.0).logprobs.requires_grad


def test_frozen_head_gets_no_gradient() -> None:
    hidden, head, targets, *_ = make("bias")
    frozen = Head(weight=head.weight.detach(), bias=head.bias.detach())
    (mine,) = torch.autograd.grad(score_tokens(hidden, frozen, targets, temperature=1.0).logprobs.sum(), hidden)
    (wanted,) = torch.autograd.grad(score_tokens(hidden, head, targets, temperature=1.0).logprobs.sum(), hidden)
    assert torch.equal(mine, wanted)


def test_no_logits_are_kept_for_the_backward_pass(columns: int) -> None:
    kept: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    hidden, head, targets, ref_hidden, ref_head = make("plain", tokens=40)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        score_tokens(hidden, head, targets, temperature=1.0, sum_pi_squared=True, reference=(ref_hidden, ref_head))
    assert max(kept) == 40 * H  # the hidden states; logits would be 40 x 11


def test_hidden_state_that_is_not_finite_shows_in_its_own_row_only() -> None:
    hidden, head, targets, *_ = make("plain")
    spoiled = hidden.detach().clone()
    spoiled[2] = math.nan
    good = score_tokens(hidden, head, targets, temperature=1.0).logprobs
    bad = score_tokens(spoiled, head, targets, temperature=1.0).logprobs
    assert bad[2].isnan()
    assert torch.equal(bad[[0, 1, 3]], good[[0, 1, 3]])


def test_token_outside_the_vocabulary_is_no_number() -> None:
    hidden, head, targets, *_ = make("plain")
    targets[1], targets[4] = VOCABULARY, -1
    scores = score_tokens(hidden, head, targets, temperature=1.0)
    assert scores.logprobs.isnan().tolist() == [False, True, False, False, True, False, False]
    assert scores.entropy.isfinite().all()


def test_no_tokens_at_all() -> None:
    hidden, head, targets, *_ = make("plain")
    scores = score_tokens(hidden[:0], head, targets[:0], temperature=1.0)
    assert scores.logprobs.shape == scores.entropy.shape == (0,)
    (gradient,) = torch.autograd.grad(scores.logprobs.sum(), head.weight)
    assert not gradient.any()


def test_other_vocabulary_in_the_reference_is_refused() -> None:
    hidden, head, targets, ref_hidden, _ = make("plain")
    with pytest.raises(ShapeError, match="policy 11 tokens, reference 5"):
        score_tokens(hidden, head, targets, temperature=1.0, reference=(ref_hidden, Head(weight=torch.ones(5, REF_H))))


@pytest.mark.usefixtures("both_ways")
def test_bfloat16_gradient_of_a_token_that_is_nearly_certain() -> None:
    """p = 1 / (1 + e^-8) = 0.99966 is 1 in bfloat16; the gradient of its logit is 1 - p = 3.35e-4 all the same."""
    hidden = torch.ones(1, 1).bfloat16().requires_grad_()
    weight = torch.tensor([[8.0], [0.0]]).bfloat16().requires_grad_()
    score_tokens(hidden, Head(weight=weight), torch.tensor([0]), temperature=1.0).logprobs.sum().backward()
    rest = 1 / (1 + math.exp(8))
    assert weight.grad.flatten().tolist() == pytest.approx([rest, -rest], rel=2**-8)


@pytest.mark.usefixtures("both_ways")
def test_bfloat16_gradients_are_as_precise_as_unrounded_logits_allow() -> None:
    """Over sharp distributions, where rounded logits would be off by 2^-9 of 60 nats: to 0.5 % of float64's norm."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 32, generator=generator).bfloat16()
    weight = (2 * torch.randn(500, 32, generator=generator)).bfloat16()
    logits = hidden.double() @ weight.double().T
    targets = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    scale = torch.randn(64, generator=generator)
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        leaves = [each.detach().to(dtype).requires_grad_() for each in (hidden, weight)]
        head = Head(weight=leaves[1], scale=0.5)
        (score_tokens(leaves[0], head, targets, temperature=0.8).logprobs * scale).sum().backward()
        found.append([each.grad.double() for each in leaves])
    for mine, exact in zip(*found, strict=True):
        assert (mine - exact).norm() < 5e-3 * exact.norm()


def _gradients(dtype: torch.dtype, passes: int = 1) -> list[Tensor]:
    """Of hidden and weight, from the last of some backward passes through the same graph."""
    hidden, head, targets, *_ = make("scale", dtype)
    scores = score_tokens(hidden, head, targets, temperature=0.7).logprobs
    weights = torch.linspace(-1, 2, N)
    for last in range(passes, 0, -1):
        found = torch.autograd.grad(scores, (hidden, head.weight), weights, retain_graph=last > 1)
    return list(found)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("passes", [1, 2])
def test_tiles_that_are_kept_change_no_gradient(
    dtype: torch.dtype, passes: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = []

    def counted(left: Tensor, right: Tensor) -> Tensor:
        products.append(right.shape)
        return exact_products.close_product(left, right)

    exact = _gradients(torch.float64)
    monkeypatch.setattr(fused_scoring, "close_product", counted)
    tile = N * columns * (4 if dtype == torch.float32 or exact_products.multiplies_bfloat16_slowly() else 2)
    tiles = -(-VOCABULARY // columns)
    for kept_bytes, kept in ((0, 0), (2 * tile, min(2, tiles)), (1 << 20, tiles)):
        monkeypatch.setattr(fused_scoring, "KEPT_BYTES", kept_bytes)
        products.clear()
        found = _gradients(dtype, passes)
        if kept_bytes == 0:
            plain = found
        if (
            products
        ):  # exact ones: a product of each tile forward, and of each that was not kept backward; all the second time
            assert len(products) == (1 + passes) * tiles - kept
            assert all(torch.equal(mine, other) for mine, other in zip(found, plain, strict=True))
        for mine, true, other in zip(found, exact, plain, strict=True):
            distance = (mine.double() - true).norm()
            assert distance <= 1.3 * (other.double() - true).norm() + 2e-3 * true.norm()


def test_without_gradient_no_tile_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    alive = []

    def watched(*given: Any) -> Tensor:
        tile = exact_products.close_product(*given)
        alive.append(weakref.ref(tile))
        return tile

    monkeypatch.setattr(fused_scoring, "close_product", watched)
    hidden, head, targets, *_ = make("plain", torch.float32)
    with torch.no_grad():
        scores = score_tokens(hidden, head, targets, temperature=1.0)
    assert alive and not any(tile() is not None for tile in alive)
    with_gradient = score_tokens(hidden, head, targets, temperature=1.0)
    assert torch.equal(with_gradient.logprobs, scores.logprobs)
