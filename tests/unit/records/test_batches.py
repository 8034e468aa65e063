"""Lengths of responses, from the mask of sampled tokens."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batches import sequence_batch


@given(rows=st.integers(0, 5), width=st.integers(0, 9), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_a_response_ends_with_its_last_sampled_token(rows: int, width: int, seed: int) -> None:
    mask = torch.rand(rows, width, generator=torch.Generator().manual_seed(seed)) < 0.4
    tokens, prompts = torch.zeros(rows, width + 2, dtype=torch.int64), torch.full((rows,), 2)
    batch = sequence_batch(tokens=tokens, prompt_lengths=prompts, response_mask=mask)
    expected = [max((place + 1 for place, sampled in enumerate(row) if sampled), default=0) for row in mask.tolist()]
    assert batch.response_lengths.tolist() == expected
    assert batch.response_lengths.dtype == torch.int64
