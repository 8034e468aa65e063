"""Drawing tokens: the frequencies are those of the distribution, and the log-prob is that of the distribution drawn from."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from posttrain.backends.rollout.native import sampling as sampling_module
from posttrain.backends.rollout.native.kernels import load_kernels
from posttrain.backends.rollout.native.sampling import draw, draw_rows, restrict, uniforms
from posttrain.records.trajectories import SamplingParams

DRAWS = 20_000
# Probabilities of eight tokens, in no order, one of them 0.
PROBABILITIES = torch.tensor([0.10, 0.30, 0.02, 0.25, 0.0, 0.05, 0.20, 0.08])
LOGITS = PROBABILITIES.log() + 3.0  # a constant does not matter


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test draws by the compiled kernel and by torch's operations, which serve where it cannot be had."""
    if request.param == "torch":
        monkeypatch.setattr(sampling_module, "_draw_kernels", lambda dtype: None)
    elif isinstance(reason := load_kernels(torch.float32), str):
        pytest.skip(reason)


def params(**options: float) -> SamplingParams:
    return SamplingParams(max_response_tokens=8, **options)


def normalised(weights: list[float]) -> list[float]:
    return [weight / sum(weights) for weight in weights]


CASES = {
    "plain": ({}, PROBABILITIES.tolist()),
    # Logits divided by 0.5: probabilities to the power of 2.
    "temperature": ({"temperature": 0.5}, normalised([p**2 for p in PROBABILITIES.tolist()])),
    "hot": ({"temperature": 2.0}, normalised([p**0.5 for p in PROBABILITIES.tolist()])),
    "top_k": ({"top_k": 3}, normalised([0, 0.30, 0, 0.25, 0, 0, 0.20, 0])),
    # From the likeliest: 0.30, 0.55, 0.75; the third is needed to reach 0.6.
    "top_p": ({"top_p": 0.6}, normalised([0, 0.30, 0, 0.25, 0, 0, 0.20, 0])),
    # At least 0.3 * 0.30 = 0.09.
    "min_p": ({"min_p": 0.3}, normalised([0.10, 0.30, 0, 0.25, 0, 0, 0.20, 0])),
    # Squares: 0.0900, 0.0625, 0.0400, 0.0100, ... The four likeliest make up 0.2025; of it 0.9 is 0.18225 <
    # 0.0900 + 0.0625 + 0.0400 = 0.1925, so three stay; the third is 0.44 of the first, below 0.5.
    "all together": (
        {"temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.5},
        normalised([0, 0.0900, 0, 0.0625, 0, 0, 0, 0]),
    ),
    "top_p below the likeliest": ({"top_p": 0.01}, [0, 1.0, 0, 0, 0, 0, 0, 0]),
    "top_k of one": ({"top_k": 1}, [0, 1.0, 0, 0, 0, 0, 0, 0]),
    "min_p of one": ({"min_p": 1.0}, [0, 1.0, 0, 0, 0, 0, 0, 0]),
    "top_k beyond the vocabulary": ({"top_k": 100}, PROBABILITIES.tolist()),
}


@pytest.mark.parametrize(("options", "expected"), CASES.values(), ids=CASES.keys())
def test_frequencies_and_logprobs_are_those_of_the_distribution(
    options: dict[str, float], expected: list[float]
) -> None:
    """Pearson's chi-square over the tokens that can be drawn stays within 5 deviations of its mean (its degrees of freedom)."""
    random = torch.from_numpy(uniforms(1, "sample", DRAWS))
    tokens, logprobs = draw(LOGITS.expand(DRAWS, -1), random, params(**options))
    counts = torch.bincount(tokens, minlength=8).tolist()
    possible = [token for token, probability in enumerate(expected) if probability > 0]
    assert sum(counts[token] for token in possible) == DRAWS  # nothing forbidden was drawn
    chi_square = sum((counts[t] - DRAWS * expected[t]) ** 2 / (DRAWS * expected[t]) for t in possible)
    freedom = len(possible) - 1
    assert chi_square <= freedom + 5 * math.sqrt(2 * freedom)
    wanted = torch.tensor(expected).log()[tokens]
    torch.testing.assert_close(logprobs, wanted, rtol=0, atol=1e-5)


def test_greedy_takes_the_likeliest_and_reports_the_plain_logprob() -> None:
    logits = torch.stack([LOGITS, LOGITS.flip(0)])
    tokens, logprobs = draw(logits, torch.tensor([0.99, 0.0]), params(temperature=0.0, top_k=1))
    assert tokens.tolist() == [1, 6]
    assert logprobs.tolist() == pytest.approx([math.log(0.3), math.log(0.3)], abs=1e-6)


def test_each_row_has_its_own_distribution_and_number() -> None:
    """Probabilities 0.25 and 0.75: numbers below 0.25 give token 0."""
    row = torch.tensor([0.25, 0.75]).log()
    logits = torch.stack([row, row, row.flip(0), row.flip(0)])
    tokens, logprobs = draw(logits, torch.tensor([0.2, 0.3, 0.7, 0.8]), params())
    assert tokens.tolist() == [0, 1, 0, 1]
    assert logprobs.exp().tolist() == pytest.approx([0.25, 0.75, 0.75, 0.25])


@pytest.mark.parametrize("number", [0.0, 1e-12, 0.5, 1 - 1e-12, float(np.nextafter(1.0, 0.0))])
@pytest.mark.parametrize("probabilities", [[0.0, 0.0, 1.0, 0.0], [0.0, 0.4, 0.6, 0.0]])
def test_token_of_probability_zero_is_never_drawn(number: float, probabilities: list[float]) -> None:
    """The ends of [0, 1) round to 0 and 1 in float32, where such tokens stand."""
    tokens, logprobs = draw(torch.tensor([probabilities]).log(), torch.tensor([number], dtype=torch.float64), params())
    assert probabilities[int(tokens)] > 0
    assert torch.isfinite(logprobs).all()


def test_large_vocabulary_in_bfloat16() -> None:
    """50,000 equally likely tokens: the rounding of a long running sum must not starve either end."""
    logits = torch.zeros(4, 50_000, dtype=torch.bfloat16)
    tokens, logprobs = draw(logits, torch.tensor([0.0, 0.25, 0.5, 0.99999]), params())
    assert tokens.tolist() == pytest.approx([0, 12_500, 25_000, 49_999], abs=30)
    assert logprobs.dtype == torch.float32
    assert logprobs.tolist() == pytest.approx([-math.log(50_000)] * 4, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [5, 128, 129, 1_000, 50_001])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_tokens_and_logprobs_are_those_of_float64(dtype: torch.dtype, vocabulary: int, temperature: float) -> None:
    """The first token whose cumulative probability exceeds the number, up to 1e-5; log-probs to 1e-5."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (4 * torch.randn(9, vocabulary, generator=generator)).to(dtype)
    logits[:, 3] = -torch.inf
    random = torch.rand(9, generator=generator, dtype=torch.float64)
    tokens, logprobs = draw(logits, random, params(temperature=temperature))
    exact = (logits.double() / (temperature or 1.0)).log_softmax(dim=1)
    chosen = exact.gather(1, tokens[:, None])[:, 0]
    assert (logprobs - chosen).abs().max() <= 1e-5
    if temperature == 0:
        assert tokens.tolist() == logits.argmax(dim=1).tolist()
        return
    until = exact.exp().cumsum(dim=1).gather(1, tokens[:, None])[:, 0]
    assert ((until - chosen.exp() - 1e-5 <= random) & (random <= until + 1e-5)).all()


def test_equal_logits_at_the_cut_of_top_k_all_stay() -> None:
    """Two tokens share second place: neither is preferred, so three stay."""
    kept = restrict(torch.tensor([[1.0, 3.0, 2.0, 2.0]]), params(top_k=2))
    assert torch.isfinite(kept).tolist() == [[False, True, True, True]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_give_a_token_id_and_logprob_nan(bad: float, temperature: float) -> None:
    """The engine sees the NaN and stops; on a GPU an id outside the vocabulary would end the process without a word."""
    logits = torch.stack([LOGITS, torch.full_like(LOGITS, bad)])
    tokens, logprobs = draw(logits, torch.tensor([0.5, 0.5]), params(temperature=temperature))
    assert 0 <= int(tokens[1]) < 8
    assert torch.isfinite(logprobs[0]) and torch.isnan(logprobs[1])


# ------------------------------------------------------------------------------------------------ random numbers


def test_random_numbers_depend_on_seed_and_sample_alone() -> None:
    first = uniforms(1, "a:0/0", 10)
    assert first.tolist() == uniforms(1, "a:0/0", 10).tolist()
    assert first[:4].tolist() == uniforms(1, "a:0/0", 4).tolist()  # whatever the limit of tokens
    for other in (uniforms(2, "a:0/0", 10), uniforms(1, "a:0/1", 10), uniforms(1, "a:1/0", 10)):
        assert not np.intersect1d(first, other).size
    # "1" + "1/a" and "11" + "/a" are different pairs
    assert uniforms(1, "1/a", 1) != uniforms(11, "/a", 1)


def test_random_numbers_are_uniform_across_samples() -> None:
    """The first number of 4,000 samples: mean 1/2 (deviation 0.0046), variance 1/12; neighbours uncorrelated."""
    first = np.array([uniforms(0, f"train.parquet:{n}/0", 1)[0] for n in range(4000)])
    assert first.min() >= 0 and first.max() < 1
    assert first.mean() == pytest.approx(0.5, abs=0.02)
    assert first.var() == pytest.approx(1 / 12, abs=0.005)
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.06


def cut_sizes(kept: Tensor) -> list[int]:
    return torch.isfinite(kept).sum(dim=1).tolist()


def test_cuts_act_in_the_order_top_k_top_p_min_p() -> None:
    """top_k = 2 leaves 0.30 and 0.25, of which the first is 0.545 > 0.5: top_p = 0.5 then keeps one token. On the uncut
    distribution it would have kept two."""
    assert cut_sizes(restrict(LOGITS[None], params(top_p=0.5))) == [2]
    assert cut_sizes(restrict(LOGITS[None], params(top_k=2, top_p=0.5))) == [1]


def test_rows_are_drawn_each_from_its_own_distribution() -> None:
    """Rows 0 and 2 take the likeliest token; row 1 of the two likeliest, 0.30 and 0.25, the second at 0.9 of their sum; row 3
    the last token with probability at 0.999 of all."""
    random = torch.tensor([0.9, 0.9, 0.1, 0.999])
    samplings = [params(temperature=0), params(top_k=2), params(temperature=0), params()]
    tokens, logprobs = draw_rows(LOGITS.expand(4, -1), random, samplings, [False] * 4)
    assert tokens.tolist() == [1, 3, 1, 7]
    expected = [math.log(p) for p in (0.30, 0.25 / 0.55, 0.30, 0.08)]
    assert logprobs.tolist() == pytest.approx(expected, abs=1e-5)


def test_a_top_p_below_float32_keeps_the_likeliest_token() -> None:
    tokens, logprobs = draw(LOGITS[None], torch.tensor([0.9]), params(top_p=1e-60))
    assert (tokens.tolist(), logprobs.tolist()) == ([1], [0.0])


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 0.99])
@pytest.mark.parametrize("candidates", [4, 40, 1024])
def test_top_p_by_the_likeliest_tokens_keeps_what_it_keeps_by_all(
    top_p: float, candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with ties, flat rows, rows with excluded tokens, and a row that is not a number."""
    monkeypatch.setattr(sampling_module, "CANDIDATES", candidates)
    scales = torch.tensor([0.0, 0.1, 1, 2, 4, 8, 1, 1])[:, None]
    logits = scales * torch.randn(8, 300, generator=torch.Generator().manual_seed(3))
    logits[3] = logits[3].round()
    logits[4, 5:] = -torch.inf
    logits[6, 7] = torch.nan
    expected = sampling_module._nucleus_of_all(logits, top_p)
    torch.testing.assert_close(sampling_module._nucleus(logits, top_p), expected, rtol=0, atol=0, equal_nan=True)


def test_top_p_of_a_large_vocabulary_sorts_no_more_than_the_likeliest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probabilities of 0.5, 0.25 and 0.25 spread over the others; 0.6 needs the first two."""
    monkeypatch.setattr(sampling_module, "_nucleus_of_all", lambda logits, top_p: pytest.fail("everything is sorted"))
    logits = torch.full((1, 152_000), math.log(0.25 / 151_998))
    logits[0, 150_000], logits[0, 3] = math.log(0.5), math.log(0.25)
    kept = restrict(logits, SamplingParams(max_response_tokens=1, top_p=0.6))
    assert kept.isfinite().nonzero().tolist() == [[0, 3], [0, 150_000]]


@pytest.mark.parametrize("spread", [0.1, 1.0, 2.0, 4.0])
def test_top_p_of_many_tokens_is_that_of_all_sorted(spread: float) -> None:
    """From distributions that 1,024 tokens show the cut of to those whose tokens all have to be sorted; ties, too."""
    logits = spread * torch.randn(3, 20_000, generator=torch.Generator().manual_seed(0))
    logits[1] = logits[1].round(decimals=1)
    sampling = SamplingParams(max_response_tokens=1, top_p=0.9)
    ordered, order = logits.double().sort(dim=1, descending=True, stable=True)
    probabilities = ordered.softmax(dim=1)
    kept = (probabilities.cumsum(dim=1) - probabilities < 0.9).sum(dim=1)
    got = restrict(logits, sampling) > -torch.inf
    assert (got.sum(dim=1) - kept).abs().max() <= 2  # rounding of the sums in float32
    for row, count in enumerate(kept.tolist()):
        assert got[row, order[row, : count - 2]].all()
