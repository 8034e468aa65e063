"""Log-probs of response tokens from a sharded model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.algos.distillation import compare_chosen
from posttrain.algos.fused_divergence import TopTokens
from posttrain.backends.torch_training.distilling import TeachersOfRow, comparison_of
from posttrain.backends.torch_training.memory import Cutter
from posttrain.backends.torch_training.sharding import Row
from posttrain.backends.train.megatron.expert_choice import ExpertChoice
from posttrain.backends.train.megatron.parts import ModelParts
from posttrain.backends.train.megatron.pipeline import Compare, Pipeline, Scores
from posttrain.backends.train.megatron.scoring import score_cut, score_top, top_of_cut
from posttrain.backends.train.megatron.sharding import MegatronSharding
from posttrain.data.packing import PackedSequences
from posttrain.models.head import states_at
from posttrain.records.batches import SequenceBatch, TeacherScores, take_rows
from posttrain.records.plans import DistillationPlan


class MegatronScorer:
    """See interfaces.train_engine.ScoringEngine. A frozen model (the reference), or the policy between updates."""

    note: str | None = None

    vocabulary: int | None = None  # token ids from here on are none of a student's; None: all are known

    def __init__(self, parts: ModelParts, cutter: Cutter, *, padded: bool = False, choice: ExpertChoice | None = None):
        self.parts = parts
        self._pipeline = Pipeline(parts, cutter, padded=padded)
        self._pipeline.choice = choice

    def logprobs(self, batch: SequenceBatch, temperature: float) -> Tensor:
        return self._pipeline.over(batch, policy_scores(self.parts, temperature))

    def logprobs_and_experts(self, batch: SequenceBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """See interfaces.train_engine.TrainEngine."""
        choice, sharding = self._pipeline.choice, self.parts.sharding
        assert choice is not None, "updates that replay experts have a choice of these"
        with choice.recording() as recorded:
            logprobs = self.logprobs(batch, temperature)
        # Every rank knows the experts of its layers for the rows of its copy. 0: not known here.
        experts = torch.zeros(*batch.tokens.shape, choice.layers, choice.chosen, dtype=torch.int32)
        for number, rows in enumerate(self._pipeline.dealt(batch)):
            for layer, chosen in recorded.get(number, {}).items():
                of_row = sharding.of_all_tokens(chosen)
                if rows:
                    experts[rows, :, layer] = 1 + self._pipeline.unpacked_tokens(of_row, batch.rows(rows)).int()
        return logprobs, (sharding.added(experts) - 1).to(torch.int16)

    def entropies(self, batch: SequenceBatch, temperature: float) -> Tensor:
        scores = policy_scores(self.parts, temperature)
        return self._pipeline.over(batch, lambda hidden, row: scores(hidden, row)[1:])

    def sum_pi_squared(self, batch: SequenceBatch, temperature: float) -> Tensor:
        scores = policy_scores(self.parts, temperature)
        return self._pipeline.over(batch, lambda hidden, row: scores(hidden, row)[2:])

    def top_logprobs(self, batch: SequenceBatch, temperature: float, k: int) -> Tensor:
        """See interfaces.train_engine.TeacherEngine."""

        def top(hidden: Tensor, row: Row) -> Sequence[Tensor]:
            return [
                top_of_cut(*_head(self.parts, hidden, row), k, **_cut(self.parts, temperature), known=self.vocabulary)
            ]

        return self._pipeline.over(batch, top, each=(2, k))

    def divergence(self, batch: SequenceBatch, answers: Mapping[str, TeacherScores], plan: DistillationPlan) -> Tensor:
        """Compute the divergence from teachers at every response token, from their most likely tokens, [B, T]; no gradient."""
        compare = divergence_from(self.parts, plan)
        return self._pipeline.beside(
            batch, lambda rows, packed, hidden, row: compare(take_rows(answers, rows), packed, hidden, row)
        )


class WithoutAdapter:
    """The reference of an adapter run: the policy's own parts without the adapter. The policy's engine, built later, provides
    them (``sharding.policy``).

    Args: weights is a context in which the adapter is disabled.
    """

    note: str | None = None

    def __init__(
        self,
        cutter: Cutter,
        sharding: MegatronSharding,
        weights: Callable[[], AbstractContextManager[Any]],
        *,
        padded: bool = False,
    ):
        self._cutter, self._sharding, self._weights, self._padded = cutter, sharding, weights, padded

    def logprobs(self, batch: SequenceBatch, temperature: float) -> Tensor:
        policy = self._sharding.policy
        assert isinstance(policy, ModelParts)
        with self._weights():
            return MegatronScorer(policy, self._cutter, padded=self._padded).logprobs(batch, temperature)


def policy_scores(parts: ModelParts, temperature: float, *, entropy_gradient: bool = False) -> Scores:
    """Return a function that computes log-probs, entropies and sums of squared probabilities."""

    def scores(hidden: Tensor, row: Row) -> Sequence[Tensor]:
        states, head = _head(parts, hidden, row)
        found = score_cut(states, head, row.targets, entropy_gradient=entropy_gradient, **_cut(parts, temperature))
        assert found.sum_pi_squared is not None
        return found.logprobs, found.entropy, found.sum_pi_squared

    return scores


def divergence_from(parts: ModelParts, plan: DistillationPlan) -> Compare:
    """Return a function that compares a micro-batch's tokens with the most likely tokens of its teachers, [m] nats."""
    how = comparison_of(plan)

    def divergence(answers: Mapping[str, TeacherScores], packed: PackedSequences, hidden: Tensor, row: Row) -> Tensor:
        states, head = _head(parts, hidden, row)

        def of(teacher: TopTokens) -> Tensor:
            near, others = score_top(states, head, teacher.ids, **_cut(parts, how.temperature))
            has_others = teacher.ids.shape[1] < parts.vocabulary
            return compare_chosen(near, others if has_others else None, teacher.logprobs, how)

        teachers = TeachersOfRow(plan=plan, how=how, answers=answers, models={}, packed=packed)
        return teachers.summed(row, of, states)

    return divergence


def _head(parts: ModelParts, hidden: Tensor, row: Row) -> tuple[Tensor, Tensor]:
    """The hidden states at the scored positions, [m, H], and the rank's part of the head."""
    # Every rank's part of the head gives a summand of the gradient of the hidden states.
    if parts.sharding.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden)
    return states_at(hidden, row.predicting), parts.head


def _cut(parts: ModelParts, temperature: float) -> dict[str, Any]:
    return {"vocabulary": parts.vocabulary, "group": parts.sharding.tensor_group, "temperature": temperature}


def frozen(
    model: PreTrainedModel, cutter: Cutter, sharding: MegatronSharding, *, padded: bool = False
) -> MegatronScorer:
    """Build the scorer of a frozen model."""
    parts = ModelParts(model, sharding)
    parts.gpt.requires_grad_(False)
    parts.release()
    return MegatronScorer(parts, cutter, padded=padded)
