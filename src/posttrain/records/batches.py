"""Batches of sequences: B rows, a prompt width P (right-aligned prompts) and a response width T (left-aligned responses).

Padding exists here only, so that stages and algorithms can speak of [B, T]; a training engine packs the rows before the
model sees them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from posttrain.records.images import PromptImages

Batch = TypeVar("Batch", "SequenceBatch", "TrainBatch")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceBatch:
    """Prompts and their responses, ready for log-probs."""

    tokens: Tensor  # [B, P + T] int64
    prompt_lengths: Tensor  # [B] int64; the prompt is tokens[:, P - length : P]
    response_mask: Tensor  # [B, T] bool, True on tokens the policy sampled
    rollout_logprobs: Tensor  # [B, T] float32 nats, 0 where masked
    rewards: Tensor  # [B] float32, 0 where invalid
    valid: Tensor  # [B] bool, the reward is a value
    group_index: Tensor  # [B] int64, equal for responses to the same prompt
    sample_ids: tuple[str, ...]  # B names, as in samples/step_N.jsonl
    scores: Tensor | None = (
        None  # [B] float32, rewards before normalisation, clipping and KL; None: the rewards are these
    )
    reward_terms: Mapping[str, Tensor] | None = (
        None  # name -> [B] float32 unweighted, NaN where a response has no such term
    )
    greedy_rewards: Tensor | None = (
        None  # [B] float32, of the prompt's greedy response, NaN if invalid; None: not sampled
    )
    trained: Tensor | None = None  # [B] bool, the response may enter the loss; None: every one may
    token_rewards: Tensor | None = None  # [B, T] float32, sums to rewards; None: all of it is on the last sampled token
    old_logprobs: Tensor | None = None  # [B, T] float32 nats, the trainer's; None: nothing needs them before the update
    sum_pi_squared: Tensor | None = None  # [B, T] float32, of the trainer before the update; None: nothing needs it
    importance_weights: Tensor | None = None  # [B, T] float32, multiply the token losses; None: no such correction
    rejected: Tensor | None = (
        None  # [B, T] bool, sampled tokens that rollout correction leaves out of the loss; None: none
    )
    ref_logprobs: Tensor | None = None  # [B, T] float32 nats; None: no KL is asked for
    values: Tensor | None = (
        None  # [B, T] float32 reward units, the critic's before the update; None: there is no critic
    )
    # A trajectory whose history an environment edited is several rows, which stand together, oldest first, and have its
    # reward each.
    trajectory_index: Tensor | None = None  # [B] int64, equal for rows of one trajectory; None: every row is one
    step_rewards: Tensor | None = None  # [B] float32, of the row's own turns; None: no environment gives rewards
    state_index: Tensor | None = None  # [B] int64, equal where the row's turn began in the same state; None: not known
    images: tuple[PromptImages | None, ...] | None = None  # B, of each row's prompt; None: there are none

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def prompt_width(self) -> int:
        return self.tokens.shape[1] - self.response_mask.shape[1]

    @property
    def response_lengths(self) -> Tensor:
        """[B] int64: tokens up to the last one in the response, whoever wrote them."""
        positions = torch.arange(1, self.response_mask.shape[1] + 1, device=self.response_mask.device)
        return (self.response_mask * positions).amax(dim=1)

    @property
    def trajectories(self) -> Tensor:
        """[B] int64: trajectory_index, written out."""
        return torch.arange(len(self)) if self.trajectory_index is None else self.trajectory_index

    @property
    def step_index(self) -> Tensor:
        """[B] int64: which row of its trajectory it is, from 0."""
        index = self.trajectories
        _, sizes = index.unique_consecutive(return_counts=True)
        starts = sizes.cumsum(0) - sizes
        return torch.arange(len(index)) - starts.repeat_interleave(sizes)

    @property
    def last_rows(self) -> Tensor:
        """[B] bool: the row is its trajectory's last, by which the trajectory is counted once."""
        index = self.trajectories
        return torch.cat([index[1:] != index[:-1], torch.ones(min(len(index), 1), dtype=torch.bool)])

    @property
    def kept_mask(self) -> Tensor:
        """[B, T] bool: sampled tokens that rollout correction did not reject."""
        return self.response_mask if self.rejected is None else self.response_mask & ~self.rejected

    def rows(self, index: list[int]) -> SequenceBatch:
        """The batch of these rows, in this order."""
        return _take(self, index)

    def with_logprobs(self, old: Tensor | None, ref: Tensor | None) -> SequenceBatch:
        return replace(self, old_logprobs=old, ref_logprobs=ref)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainBatch:
    """What the update consumes."""

    sequences: SequenceBatch
    advantages: Tensor  # [B, T] float32, reward units; 0 where masked
    loss_mask: Tensor  # [B, T] bool, the token enters the loss
    returns: Tensor | None = None  # [B, T] float32 reward units, what the critic learns; None: there is no critic

    def __len__(self) -> int:
        return len(self.sequences)

    def rows(self, index: list[int]) -> TrainBatch:
        """The batch of these rows, in this order."""
        return _take(self, index)

    def counts(self) -> LossCounts:
        return LossCounts(
            tokens=int(self.loss_mask.sum()),
            sequences=int(self.loss_mask.any(dim=1).sum()),
            prompt_tokens=_prompt_tokens(self.sequences.group_index, self.loss_mask),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCounts:
    """What losses divide by: counted over the whole mini-batch, so that no way of splitting it changes the gradient."""

    tokens: int
    sequences: int
    prompt_tokens: Mapping[int, int] = field(default_factory=dict)  # group -> tokens of all its responses, where any


def _prompt_tokens(group_index: Tensor, mask: Tensor) -> dict[int, int]:
    found = Counter[int]()
    for group, tokens in zip(group_index.tolist(), mask.sum(dim=1).tolist(), strict=True):
        found[group] += tokens
    return {group: tokens for group, tokens in found.items() if tokens}


def _take(batch: Batch, index: list[int]) -> Batch:
    """Rows of every row-wise field of a batch record."""
    rows = torch.tensor(index, dtype=torch.int64)
    changes: dict[str, Any] = {}
    for item in fields(batch):
        value = getattr(batch, item.name)
        if isinstance(value, Tensor):
            changes[item.name] = value[rows]
        elif isinstance(value, SequenceBatch):
            changes[item.name] = value.rows(index)
        elif isinstance(value, Mapping):
            changes[item.name] = {name: tensor[rows] for name, tensor in value.items()}
        elif isinstance(value, tuple):
            changes[item.name] = tuple(value[i] for i in index)
    return replace(batch, **changes)
