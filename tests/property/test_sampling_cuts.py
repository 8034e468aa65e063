"""What top-k, top-p and min-p leave over, whatever the distribution."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from posttrain.backends.rollout.native.sampling import draw, restrict
from posttrain.records.trajectories import SamplingParams

finite = st.floats(-30, 30, width=32)
logits_of = st.lists(finite | st.just(-torch.inf), min_size=1, max_size=12).filter(lambda row: max(row) > -torch.inf)
cuts = st.builds(
    SamplingParams,
    max_response_tokens=st.just(1),
    temperature=st.floats(0.1, 5),
    top_k=st.integers(0, 14),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
)


def kept_of(logits: list[float], sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    row = torch.tensor([logits])
    return row[0], restrict(row, sampling)[0]


@given(logits_of, cuts)
def test_likeliest_token_stays_and_kept_logits_are_unchanged(logits: list[float], sampling: SamplingParams) -> None:
    before, after = kept_of(logits, sampling)
    assert torch.isfinite(after[before.argmax()])
    kept = torch.isfinite(after)
    assert torch.equal(after[kept], before[kept])


@given(logits_of, cuts)
def test_nothing_less_likely_is_kept_than_what_is_dropped(logits: list[float], sampling: SamplingParams) -> None:
    before, after = kept_of(logits, sampling)
    kept = torch.isfinite(after)
    dropped = ~kept & torch.isfinite(before)
    if dropped.any():
        assert before[kept].min() >= before[dropped].max()


@given(st.lists(finite, min_size=1, max_size=12), st.floats(0.01, 0.99))
def test_top_p_keeps_the_smallest_set_that_reaches_p(logits: list[float], top_p: float) -> None:
    """In float64, written as the definition says, with a margin for float32's rounding."""
    before, after = kept_of(logits, SamplingParams(max_response_tokens=1, top_p=top_p))
    probabilities = before.double().softmax(0)
    kept = probabilities[torch.isfinite(after)]
    assert kept.sum() >= top_p - 1e-5
    assert kept.sum() - kept.min() <= top_p + 1e-5  # one token fewer would not have reached it


@given(logits_of, cuts, st.floats(0, 1, exclude_max=True))
def test_drawn_token_was_kept_and_its_logprob_is_renormalised(
    logits: list[float], sampling: SamplingParams, number: float
) -> None:
    row = torch.tensor([logits])
    tokens, logprobs = draw(row, torch.tensor([number], dtype=torch.float64), sampling)
    kept = restrict(row / sampling.temperature, sampling)[0]
    token = int(tokens)
    assert torch.isfinite(kept[token])
    torch.testing.assert_close(logprobs[0], kept.log_softmax(0)[token], rtol=0, atol=1e-5)
