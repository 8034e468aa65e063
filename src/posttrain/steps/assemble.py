"""From scored groups to one batch of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.records.batches import SequenceBatch
from posttrain.records.images import PromptImages
from posttrain.records.trajectories import Outcome, Reward, ScoredGroup, StopReason, Trajectory


@dataclass(frozen=True, slots=True)
class _Row:
    """One sample of a trajectory."""

    group: int
    trajectory: int
    sample: Trajectory
    last: bool  # of its trajectory
    prompt: tuple[int, ...]
    outcome: Outcome
    trained: bool
    images: PromptImages | None


def assemble(groups: Sequence[ScoredGroup], *, mask_truncated: bool = False) -> SequenceBatch:
    """All samples of all responses of all groups, in order: prompts right-aligned to the longest, responses left-aligned to the
    longest.

    ``mask_truncated`` leaves responses that were cut at the token limit out of the loss; their rewards stay.
    """
    rows = list(_rows(groups, mask_truncated))
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
    rewards = torch.tensor([row.outcome.value if isinstance(row.outcome, Reward) else 0.0 for row in rows])
    by_turn = _turn_rewards(rows, response_width)
    return SequenceBatch(
        tokens=tokens,
        prompt_lengths=torch.tensor([len(row.prompt) for row in rows]),
        response_mask=mask,
        rollout_logprobs=logprobs,
        rewards=rewards,
        scores=rewards,
        reward_terms=_terms([row.outcome for row in rows]),
        valid=torch.tensor([isinstance(row.outcome, Reward) for row in rows]),
        group_index=torch.tensor([row.group for row in rows]),
        sample_ids=tuple(row.sample.sample_id for row in rows),
        trained=torch.tensor([row.trained for row in rows]),
        trajectory_index=torch.tensor([row.trajectory for row in rows]),
        token_rewards=by_turn,
        step_rewards=None if by_turn is None else by_turn.sum(dim=1),
        state_index=_states(rows),
        images=tuple(row.images for row in rows) if any(row.images for row in rows) else None,
    )


def _rows(groups: Sequence[ScoredGroup], mask_truncated: bool) -> Iterator[_Row]:
    number = 0
    for index, group in enumerate(groups):
        for trajectory, outcome in zip(group.group.trajectories, group.outcomes, strict=True):
            trained = group.kept and not (mask_truncated and trajectory.stop_reason is StopReason.LENGTH)
            for sample in trajectory.samples:
                prompt = sample.prompt_token_ids
                prompt = group.group.prompt.token_ids if prompt is None else prompt
                # An episode that failed before it began has no token; a model that reads rows needs one, which no loss sees.
                prompt = prompt or (0,)
                yield _Row(
                    index, number, sample, sample is trajectory, prompt, outcome, trained, group.group.prompt.images
                )
            number += 1


def _turn_rewards(rows: Sequence[_Row], width: int) -> Tensor | None:
    """[B, T] float32: an environment's rewards on the last sampled tokens of their turns, and what else a trajectory is worth
    on its last one. None where no turn has a reward."""
    if not any(turn.reward is not None for row in rows for turn in row.sample.turns):
        return None
    placed = torch.zeros(len(rows), width)
    rest = 0.0  # of the trajectory's reward, not on a token yet
    for index, row in enumerate(rows):
        if not isinstance(row.outcome, Reward):
            continue
        if not index or rows[index - 1].last:
            rest = row.outcome.value
        for turn in row.sample.turns if row.outcome.by_turn else ():
            if turn.reward is not None:
                placed[index, turn.end - 1] += turn.reward
                rest -= turn.reward
        if row.last and any(row.sample.sampled_mask):
            sampled = [place for place, own in enumerate(row.sample.sampled_mask) if own]
            # Floats that cancel leave dust, which would be a signal where a critic or a discount looks at single tokens.
            if abs(rest) > 1e-9 * (1.0 + abs(row.outcome.value)):
                placed[index, sampled[-1]] += rest
    return placed


def _states(rows: Sequence[_Row]) -> Tensor | None:
    """[B] int64: a number for the state that each row's turn began in. None unless every row with turns has one of them, with
    a key."""
    with_turns = [row for row in rows if row.sample.turns]
    if not with_turns or any(len(row.sample.turns) > 1 or row.sample.turns[0].state_key is None for row in with_turns):
        return None
    keys: dict[str | None, int] = {}
    return torch.tensor(
        [keys.setdefault(row.sample.turns[0].state_key if row.sample.turns else None, len(keys)) for row in rows]
    )


def _terms(outcomes: Sequence[Outcome]) -> dict[str, Tensor]:
    """Every term that some response has, [B]; NaN for responses that do not have it."""
    by_row = [dict(outcome.terms) if isinstance(outcome, Reward) else {} for outcome in outcomes]
    names = dict.fromkeys(name for terms in by_row for name in terms)
    return {name: torch.tensor([terms.get(name, float("nan")) for terms in by_row]) for name in names}
