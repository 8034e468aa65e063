"""From scored groups to one batch of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.records.batches import SequenceBatch
from posttrain.records.trajectories import Outcome, Reward, ScoredGroup, StopReason


def assemble(groups: Sequence[ScoredGroup], *, mask_truncated: bool = False) -> SequenceBatch:
    """All responses of all groups, in order: prompts right-aligned to the longest, responses left-aligned to the longest.

    ``mask_truncated`` leaves responses that were cut at the token limit out of the loss; their rewards stay.
    """
    rows = [
        (index, group.group.prompt.token_ids, trajectory, outcome)
        for index, group in enumerate(groups)
        for trajectory, outcome in zip(group.group.trajectories, group.outcomes, strict=True)
    ]
    prompt_width = max(len(prompt) for _, prompt, _, _ in rows)
    response_width = max(len(trajectory.token_ids) for _, _, trajectory, _ in rows)
    tokens = torch.zeros(len(rows), prompt_width + response_width, dtype=torch.int64)
    mask = torch.zeros(len(rows), response_width, dtype=torch.bool)
    logprobs = torch.zeros(len(rows), response_width)
    for row, (_, prompt, trajectory, _) in enumerate(rows):
        response = len(trajectory.token_ids)
        tokens[row, prompt_width - len(prompt) : prompt_width] = torch.tensor(prompt)
        tokens[row, prompt_width : prompt_width + response] = torch.tensor(trajectory.token_ids)
        mask[row, :response] = True
        logprobs[row, :response] = torch.tensor(trajectory.logprobs)
    rewards = torch.tensor([outcome.value if isinstance(outcome, Reward) else 0.0 for *_, outcome in rows])
    return SequenceBatch(
        tokens=tokens,
        prompt_lengths=torch.tensor([len(prompt) for _, prompt, _, _ in rows]),
        response_mask=mask,
        rollout_logprobs=logprobs,
        rewards=rewards,
        scores=rewards,
        reward_terms=_terms([outcome for *_, outcome in rows]),
        valid=torch.tensor([isinstance(outcome, Reward) for *_, outcome in rows]),
        group_index=torch.tensor([index for index, *_ in rows]),
        sample_ids=tuple(trajectory.sample_id for _, _, trajectory, _ in rows),
        trained=torch.tensor(
            [
                groups[index].kept and not (mask_truncated and trajectory.stop_reason is StopReason.LENGTH)
                for index, _, trajectory, _ in rows
            ]
        ),
    )


def _terms(outcomes: Sequence[Outcome]) -> dict[str, Tensor]:
    """Every term that some response has, [B]; NaN for responses that do not have it."""
    by_row = [dict(outcome.terms) if isinstance(outcome, Reward) else {} for outcome in outcomes]
    names = dict.fromkeys(name for terms in by_row for name in terms)
    return {name: torch.tensor([terms.get(name, float("nan")) for terms in by_row]) for name in names}
