"""The batches of a step, a type per stage: sampled, scored, shaped, ready to train on.

Shapes: B rows, a prompt width P (prompts are right-aligned) and a response width T (responses are left-aligned). Padding exists
here only, so that stages and algorithms can speak of [B, T]; a training engine packs the rows before the model sees them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from posttrain.records.images import PromptImages
from posttrain.records.span_tensors import kept_rows, last_columns, last_places, row_counts, spread
from posttrain.records.trajectories import OwnDraws

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceBatch:
    """Prompts and responses as they were sampled: the tokens that models score and learn.

    A trajectory whose history an environment edited is several rows, which stand together, oldest first.
    """

    tokens: Tensor  # [B, P + T] int64
    prompt_lengths: Tensor  # [B] int64; the prompt is tokens[:, P - length : P]
    response_mask: Tensor  # [B, T] bool, True on tokens the policy sampled
    rollout_logprobs: Tensor  # [B, T] float32 nats, 0 where masked
    group_index: Tensor  # [B] int64, equal for responses to the same prompt
    trajectory_index: Tensor  # [B] int64, equal for rows of one trajectory
    sample_ids: tuple[str, ...]  # B names, as in samples/step_N.jsonl
    data_sources: tuple[str, ...] = ()  # B, of each row's prompt; (): not known
    experts: Tensor | None = None  # [B, P + T, layers, chosen] int16, while sampling; -1: not known; None: not recorded
    images: tuple[PromptImages | None, ...] = ()  # B, of each row; (): no row has any
    own_draws: tuple[tuple[OwnDraws, ...], ...] = ()  # B, tokens of each row with a distribution of their own; (): none
    # [B, T] int64, updates that the weights had seen which sampled the token; None: no response has several
    versions: Tensor | None = None

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def prompt_width(self) -> int:
        return self.tokens.shape[1] - self.response_mask.shape[1]

    @property
    def response_lengths(self) -> Tensor:
        """[B] int64: tokens up to the last sampled one, observations in between included."""
        return last_places(self.response_mask)

    @property
    def step_index(self) -> Tensor:
        """[B] int64: the number of the row within its trajectory, from 0."""
        _, sizes = self.trajectory_index.unique_consecutive(return_counts=True)
        starts = sizes.cumsum(0) - sizes
        return torch.arange(len(self)) - starts.repeat_interleave(sizes)

    @property
    def last_rows(self) -> Tensor:
        """[B] bool: the row is its trajectory's last, by which the trajectory is counted once."""
        index = self.trajectory_index
        return torch.cat([index[1:] != index[:-1], torch.ones(min(len(index), 1), dtype=torch.bool)])

    @property
    def last_tokens(self) -> Tensor:
        """[B, T] bool: the token is the last one that was sampled in its trajectory."""
        lengths = torch.where(self.last_rows, self.response_lengths, 0)
        return last_columns(lengths, self.response_mask.shape[1])

    @property
    def turn_begins(self) -> Tensor:
        """[B, T] bool: the token is sampled, and the one before it is not."""
        before = torch.cat([torch.zeros_like(self.response_mask[:, :1]), self.response_mask[:, :-1]], dim=1)
        return self.response_mask & ~before

    def rows(self, index: list[int]) -> SequenceBatch:
        """The batch of these rows, in this order; the same one where these are all rows in their order."""
        return self if index == list(range(len(self))) else take_rows(self, index)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredBatch:
    """Sequences and their rewards, as reward functions and environments gave them."""

    sequences: SequenceBatch
    rewards: Tensor  # [B] float32, of the whole trajectory; 0 where invalid
    valid: Tensor  # [B] bool, the reward is a value
    trained: Tensor  # [B] bool, the response may enter the loss
    # [B] float32 unweighted, NaN without this term
    reward_terms: Mapping[str, Tensor] = field(default_factory=dict)
    turn_rewards: Tensor | None = None  # [B, T] float32, each turn's on its last token; None: no environment gives any
    weights: Tensor | None = None  # [B] float32 of the response in the policy loss, mean 1; None: all count the same
    part_index: Tensor | None = None  # [B] int64, equal where batch statistics are taken together; None: over all rows
    # Inputs of single estimators, computed where the chosen one names them: greedy_rewards [B] float32, NaN if invalid;
    # sum_pi_squared [B, T] float32; state_index [B] int64, equal where the row's turn began in the same state, and state_texts,
    # B texts of these states; column:NAME, B values of a column of the data.
    extras: Mapping[str, Tensor | tuple[Any, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainerLogprobs:
    """Log-probs by the trainer's models before the first update, and the correction of the sampler's computed from them."""

    old: Tensor | None = None  # [B, T] float32 nats; None: on-policy, the first forward pass of the update gives them
    ref: Tensor | None = None  # [B, T] float32 nats; None: there is no KL to a reference
    full_kl: Tensor | None = (
        None  # [B, T] float32 nats, to the reference over the vocabulary; None: not part of the reward
    )
    entropies: Tensor | None = None  # [B, T] float32 nats, of the policy; None: the loss does not choose tokens by them
    # [B, P + T, layers, chosen] int16, while ``old`` was computed, until the sequences have them; None: they keep theirs
    experts: Tensor | None = None
    # [B, T] float32, multiply the token losses; None: not corrected by weights
    importance_weights: Tensor | None = None
    rejected: Tensor | None = None  # [B, T] bool, sampled tokens left out of the loss; None: no rule rejects any
    # [B, T] float32, alpha of algos.proximal for the mini-batch; None: the proximal log-probs are ``old``
    proximal_share: Tensor | None = None

    def kept(self, response_mask: Tensor) -> Tensor:
        """[B, T] bool: sampled tokens that are not rejected."""
        return response_mask if self.rejected is None else response_mask & ~self.rejected


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TeacherScores:
    """The answers of one teacher before the update. [B, T]: 0 on rows that are not its own, and where masked."""

    rows: Tensor  # [B] bool, the rows that have this teacher
    logprobs: Tensor | None = None  # [B, T] float32 nats, of the sampled tokens; None: not read
    top: Tensor | None = None  # [B, T, 2, k] float32, its k most likely tokens: their ids, and nats; None: not read


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShapedBatch:
    """A scored batch with the rewards that advantages are estimated from: normalised, clipped, less the KL."""

    scored: ScoredBatch
    logprobs: TrainerLogprobs
    rewards: Tensor  # [B] float32, of the whole trajectory
    token_rewards: Tensor | None = None  # [B, T] float32, sum to rewards; None: all of it is on the last sampled token
    # By name; empty: there is none, or the loss does not read them
    teachers: Mapping[str, TeacherScores] = field(default_factory=dict)
    # [B, T] float32 nats, from the teachers, where advantages are reduced by it; times its coefficient
    divergence: Tensor | None = None
    penalty: Tensor | None = None
    teachers_alone: bool = False  # rewards count for nothing

    @property
    def loss_mask(self) -> Tensor:
        """[B, T] bool: sampled tokens that are not rejected, of trained rows with a valid reward; where teachers alone are
        learned from, of all trained rows."""
        trained = self.scored.trained if self.teachers_alone else self.scored.valid & self.scored.trained
        return kept_rows(self.logprobs.kept(self.sequences.response_mask), trained)

    @property
    def sequences(self) -> SequenceBatch:
        return self.scored.sequences

    def rewards_on_tokens(self) -> Tensor:
        """[B, T] float32: token_rewards, or each trajectory's reward on its last sampled token; 0 elsewhere."""
        if self.token_rewards is not None:
            return self.token_rewards
        return spread(self.rewards, self.sequences.last_tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CriticTargets:
    """The critic's values before its update, and the returns that they are moved towards."""

    values: Tensor  # [B, T] float32, reward units
    returns: Tensor  # [B, T] float32, reward units


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreferenceTargets:
    """The labels of completions in preference tuning; those that a method does not read are 0."""

    ref_logps: Tensor  # [B] float64 nats, of the whole completion, of the reference
    desirable: Tensor  # [B] bool, of single completions
    margins: Tensor  # [B] float32, equal for both rows of a pair: by how much the chosen side is better


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainBatch:
    """The input of the update."""

    sequences: SequenceBatch
    scores: Tensor  # [B] float32, rewards before shaping
    logprobs: TrainerLogprobs
    advantages: Tensor  # [B, T] float32, reward units; 0 where masked
    loss_mask: Tensor  # [B, T] bool, the token enters the loss
    weights: Tensor | None = None  # [B] float32, as in ScoredBatch
    high_entropy: Tensor | None = None  # [B, T] bool, the only tokens of the policy loss; None: all loss tokens
    # [B, T] bool, the tokens that a loss with chooses_tokens treats otherwise; None: it chooses among those that it sees
    chosen: Tensor | None = None
    critic: CriticTargets | None = None  # None: there is no critic
    preference: PreferenceTargets | None = None  # None: no preference is learned
    # By name; empty: none, or not in the loss
    teachers: Mapping[str, TeacherScores] = field(default_factory=dict)
    # [B, T] float32 nats, that advantages have less; None: none is taken from them
    divergence: Tensor | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    def rows(self, index: list[int]) -> TrainBatch:
        """The batch of these rows, in this order; the same one where these are all rows in their order."""
        return self if index == list(range(len(self))) else take_rows(self, index)

    def counts(self) -> LossCounts:
        tokens = row_counts(self.loss_mask)
        return LossCounts(
            tokens=int(tokens.sum()),
            sequences=int((tokens > 0).sum()),
            prompt_tokens=_prompt_tokens(self.sequences.group_index, tokens),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCounts:
    """The divisors of losses: counted over the whole mini-batch, so that no way of splitting it changes the gradient."""

    tokens: int
    sequences: int
    # Group -> tokens of all its responses, where any
    prompt_tokens: Mapping[int, int] = field(default_factory=dict)


def _prompt_tokens(group_index: Tensor, tokens: Tensor) -> dict[int, int]:
    """Add up the loss tokens [B] of each group."""
    found = Counter[int]()
    for group, count in zip(group_index.tolist(), tokens.tolist(), strict=True):
        found[group] += count
    return {group: tokens for group, tokens in found.items() if tokens}


def take_rows(record: Record, index: list[int]) -> Record:
    """These rows of every row-wise field of a record, and of the records inside it; neighbours are not copied."""
    neighbours = len(index) > 0 and index == list(range(index[0], index[0] + len(index)))
    taken = slice(index[0], index[0] + len(index)) if neighbours else torch.tensor(index, dtype=torch.int64)

    def rows_of(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[taken]
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{item.name: rows_of(getattr(value, item.name)) for item in fields(value)})
        if isinstance(value, Mapping):
            return {name: rows_of(tensor) for name, tensor in value.items()}
        if isinstance(value, tuple) and value:
            return tuple(value[i] for i in index)
        return value

    found: Record = rows_of(record)
    return found
