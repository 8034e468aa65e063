"""Rows of samples as tensors: prompts right-aligned to the longest, responses left-aligned to the longest. Tokens and log-probs
that lie in a store are not read for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from posttrain.records.batches import SequenceBatch
from posttrain.records.samples import SampleRow
from posttrain.records.span_tensors import first_columns, mask_of_flags
from posttrain.records.stored_tensors import padded
from posttrain.steps.recorded_experts import recorded_experts


def pad(rows: Sequence[SampleRow], sources: tuple[str, ...] = ()) -> SequenceBatch:
    """Token ids exactly as they were sampled, and 0 where a row has none. Args: sources, the data source of each row."""
    prompts = torch.tensor([len(row.prompt) for row in rows])
    lengths = torch.tensor([len(row.sample.token_ids) for row in rows])
    prompt_width = int(prompts.max())
    # At least a column: every episode of a step may have failed before its first token.
    response_width = max(1, int(lengths.max()))
    responses = [row.sample.token_ids for row in rows], torch.full_like(prompts, prompt_width)
    read = [row.prompt for row in rows], prompt_width - prompts
    logprobs = [row.sample.logprobs for row in rows], torch.zeros_like(prompts)
    with_observations = any(row.sample.response_mask for row in rows)
    return SequenceBatch(
        tokens=padded(read, responses, width=prompt_width + response_width, dtype=torch.int64),
        experts=recorded_experts(rows, prompt_width, response_width),
        prompt_lengths=prompts,
        response_mask=(
            mask_of_flags([row.sample.sampled_mask for row in rows], response_width)
            if with_observations
            else first_columns(lengths, response_width)
        ),
        rollout_logprobs=padded(logprobs, width=response_width, dtype=torch.float32),
        group_index=torch.tensor([row.group for row in rows]),
        trajectory_index=torch.tensor([row.trajectory for row in rows]),
        sample_ids=tuple(row.sample.sample_id for row in rows),
        data_sources=sources,
        own_draws=tuple(row.sample.own_draws for row in rows) if any(row.sample.own_draws for row in rows) else (),
        images=tuple(row.images for row in rows) if any(row.images for row in rows) else (),
    )
