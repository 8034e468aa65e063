"""The divergence of the policy from its teachers, inside the policy's forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.algos.distillation import Comparison, compare_top
from posttrain.algos.fused_divergence import TeacherStates, TopTokens, logits_divergence, score_divergence
from posttrain.algos.fused_scoring import Head
from posttrain.backends.torch_training.sharding import Row
from posttrain.data.packing import PackedSequences
from posttrain.models.head import HeadForm
from posttrain.records.batches import TeacherScores
from posttrain.records.plans import DistillationPlan
from posttrain.registry import DIVERGENCES


class TeacherModel(Protocol):
    """A frozen model that is computed inside the student's forward pass: a LogprobScorer."""

    @property
    def model(self) -> PreTrainedModel: ...

    @property
    def head(self) -> HeadForm | str: ...

    def frozen_hidden(self, row: Row) -> Tensor: ...

    def frozen_logits(self, row: Row) -> Tensor: ...


def comparison_of(plan: DistillationPlan) -> Comparison:
    """Return the comparison of a plan, with its divergence and that one's settings."""
    return Comparison(
        divergence=partial(DIVERGENCES.get(plan.name, plan.path), **plan.parameters),
        temperature=plan.temperature,
        teacher_temperature=plan.teacher_temperature,
        top_k=plan.top_k,
        rest=plan.rest,
        min_logprob=plan.min_logprob,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TeachersOfRow:
    """The teachers of one packed micro-batch.

    ``models`` are computed on the same row as the student, where the whole vocabulary is compared; where the teachers' top k is,
    their answers from before the update are in ``answers`` and no model is needed.
    """

    plan: DistillationPlan
    how: Comparison
    answers: Mapping[str, TeacherScores]
    models: Mapping[str, TeacherModel]
    packed: PackedSequences

    @property
    def needs_logits(self) -> bool:
        """True when some teacher's head has an unknown form."""
        return any(isinstance(model.head, str) for model in self.models.values())

    def divergence(self, row: Row, hidden: Tensor, head: Head) -> Tensor:
        """The weighted sum of the divergences at the scored tokens, from the student's hidden states. Returns: [m] nats."""

        def of(teacher: TeacherModel | TopTokens) -> Tensor:
            if isinstance(teacher, TopTokens):
                return score_divergence(hidden, head, teacher, self.how)
            form = teacher.head
            assert not isinstance(form, str)
            states = TeacherStates(hidden=teacher.frozen_hidden(row), head=form.of(teacher.model))
            return score_divergence(hidden, head, states, self.how)

        return self.summed(row, of, hidden)

    def divergence_of_logits(self, row: Row, logits: Tensor) -> Tensor:
        """The same from the student's logits [m, vocabulary]."""

        def of(teacher: TeacherModel | TopTokens) -> Tensor:
            if isinstance(teacher, TopTokens):
                return compare_top(logits.float(), teacher.ids, teacher.logprobs, self.how)
            return logits_divergence(logits.float(), teacher.frozen_logits(row).float(), self.how)

        return self.summed(row, of, logits)

    def summed(self, row: Row, of: Any, like: Tensor) -> Tensor:
        """Add up ``of`` every teacher, [m] nats, by its weight. Args: like, a tensor [m, ...] of the student's."""
        total = like.new_zeros(like.shape[0], dtype=torch.promote_types(like.dtype, torch.float32))
        for name, weight in self.plan.teachers.items():
            answer = self.answers[name]
            if not answer.rows.any():
                continue
            mine = self._scored(answer.rows[:, None].expand_as(self.packed.response_mask), row)
            teacher: Any = self.models.get(name)
            if answer.top is not None:
                top = self._scored(answer.top, row)
                teacher = TopTokens(ids=top[:, 0].long(), logprobs=top[:, 1])
            found = of(teacher)
            if self.plan.clip is not None:
                found = found.clamp(-self.plan.clip, self.plan.clip)
            total = total + weight * torch.where(mine, found, 0.0)
        return total

    def _scored(self, values: Tensor, row: Row) -> Tensor:
        """Select the values [B, T, ...] of the m scored tokens of this process."""
        chosen = values.to(self.packed.response_mask.device)[self.packed.response_mask]
        if row.places is None:
            return chosen
        return chosen[row.places if len(row.places) else row.places.new_zeros(1)]
