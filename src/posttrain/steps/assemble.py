"""Assemble scored groups into one batch of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from posttrain.records.batches import ScoredBatch
from posttrain.records.samples import sample_rows
from posttrain.records.trajectories import Outcome, Reward, ScoredGroup
from posttrain.steps.padding import pad
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


def reward_terms(outcomes: Sequence[Outcome]) -> dict[str, Tensor]:
    """Every term that some response has, [B]; NaN for responses that do not have it."""
    by_row = [dict(outcome.terms) if isinstance(outcome, Reward) else {} for outcome in outcomes]
    names = dict.fromkeys(name for terms in by_row for name in terms)
    return {name: torch.tensor([terms.get(name, float("nan")) for terms in by_row]) for name in names}
