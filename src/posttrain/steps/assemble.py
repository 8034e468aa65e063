"""Assemble scored groups into one batch of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from posttrain.records.batches import ScoredBatch, SequenceBatch
from posttrain.records.samples import SampleRow, sample_rows
from posttrain.records.trajectories import Outcome, Reward, ScoredGroup
from posttrain.steps.recorded_experts import recorded_experts
from posttrain.steps.recorded_versions import token_versions
from posttrain.steps.response_weights import response_weights, sampled_lengths
from posttrain.steps.turns import state_index, turn_rewards


def assemble(
    groups: Sequence[ScoredGroup],
    *,
    mask_truncated: bool = False,
    mask_long_wrong_tokens: int | None = None,
    weigh_by: Sequence[str] = (),
    parts: Mapping[str, int] | None = None,
    with_versions: bool = False,
) -> ScoredBatch:
    """All samples of all responses of all groups, in order: prompts right-aligned to the longest, responses left-aligned to the
    longest.

    ``mask_truncated`` leaves responses that were cut at the token limit out of the loss, ``mask_long_wrong_tokens`` those of so
    many sampled tokens whose score is not above 0; their rewards stay. ``weigh_by`` names the weights of responses, ``parts``
    numbers the domains of data sources, where statistics are over domains; ``with_versions`` gives every token the version of
    the weights that sampled it, also without need where a response has several.

    Raises: RunStopped when a prompt lacks the difficulty that it is to be weighed by.
    """
    rows = sample_rows(groups)
    sequences = pad(rows, tuple(groups[row.group].group.prompt.data_source for row in rows))
    if with_versions or any(row.sample.version_spans for row in rows):
        sequences = replace(sequences, versions=token_versions(rows, sequences.response_mask))
    states = state_index(rows)
    lengths = sampled_lengths(groups)
    wrong = mask_long_wrong_tokens
    return ScoredBatch(
        sequences=sequences,
        rewards=torch.tensor([row.reward for row in rows]),
        valid=torch.tensor([isinstance(row.outcome, Reward) for row in rows]),
        trained=torch.tensor(
            [
                row.kept
                and not (mask_truncated and row.truncated)
                and not (wrong is not None and row.reward <= 0 and lengths[row.trajectory] >= wrong)
                for row in rows
            ]
        ),
        weights=response_weights(groups, lengths, weigh_by)[[row.trajectory for row in rows]] if weigh_by else None,
        reward_terms=reward_terms([row.outcome for row in rows]),
        turn_rewards=turn_rewards(rows, width=sequences.response_mask.shape[1]),
        part_index=torch.tensor([parts[groups[row.group].group.prompt.data_source] for row in rows]) if parts else None,
        extras={} if states is None else {"state_index": states},
    )


def pad(rows: Sequence[SampleRow], sources: tuple[str, ...] = ()) -> SequenceBatch:
    """Token ids exactly as they were sampled, and 0 where a row has none. Args: sources, the data source of each row."""
    prompt_width = max(len(row.prompt) for row in rows)
    response_width = max(len(row.sample.token_ids) for row in rows)
    tokens = torch.zeros(len(rows), prompt_width + response_width, dtype=torch.int64)
    mask = torch.zeros(len(rows), response_width, dtype=torch.bool)
    logprobs = torch.zeros(len(rows), response_width)
    for index, row in enumerate(rows):
        response = len(row.sample.token_ids)
        tokens[index, prompt_width - len(row.prompt) : prompt_width] = torch.tensor(row.prompt)
        tokens[index, prompt_width : prompt_width + response] = torch.tensor(row.sample.token_ids)
        mask[index, :response] = torch.tensor(row.sample.sampled_mask)
        logprobs[index, :response] = torch.tensor(row.sample.logprobs)
    return SequenceBatch(
        tokens=tokens,
        experts=recorded_experts(rows, prompt_width, response_width),
        prompt_lengths=torch.tensor([len(row.prompt) for row in rows]),
        response_mask=mask,
        rollout_logprobs=logprobs,
        group_index=torch.tensor([row.group for row in rows]),
        trajectory_index=torch.tensor([row.trajectory for row in rows]),
        sample_ids=tuple(row.sample.sample_id for row in rows),
        data_sources=sources,
        images=tuple(row.images for row in rows) if any(row.images for row in rows) else (),
    )


def reward_terms(outcomes: Sequence[Outcome]) -> dict[str, Tensor]:
    """Every term that some response has, [B]; NaN for responses that do not have it."""
    by_row = [dict(outcome.terms) if isinstance(outcome, Reward) else {} for outcome in outcomes]
    names = dict.fromkeys(name for terms in by_row for name in terms)
    return {name: torch.tensor([terms.get(name, float("nan")) for terms in by_row]) for name in names}
