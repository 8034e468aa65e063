"""Teachers of sampled responses: their answers before the update, and the divergence that advantages are reduced by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from posttrain.algos.distilled_tokens import sampled_divergence
from posttrain.interfaces.phase_clock import PhaseClock
from posttrain.interfaces.roles import Roles
from posttrain.interfaces.train_engine import TeacherEngine, TrainEngine
from posttrain.records.batches import SequenceBatch, ShapedBatch, TeacherScores
from posttrain.records.plans import DistillationPlan, StepPlan


def ask_teachers(
    batch: SequenceBatch,
    teachers: Mapping[str, TeacherEngine],
    plan: DistillationPlan,
    sources: Mapping[str, frozenset[str]],
) -> dict[str, TeacherScores]:
    """Ask every teacher for its rows: the log-probs of the sampled tokens, or its most likely tokens there. A teacher that is
    computed beside the student gives no answer here.

    Args: sources, the data sources of each teacher; empty means all rows.
    """
    temperature = plan.temperature * plan.teacher_temperature
    return {
        name: _answer(batch, _rows_of(batch, sources.get(name, frozenset())), teachers.get(name), plan, temperature)
        for name in plan.teachers
    }


def _rows_of(batch: SequenceBatch, sources: frozenset[str]) -> Tensor:
    """The rows that have a teacher, [B] bool."""
    if not sources:
        return torch.ones(len(batch), dtype=torch.bool)
    return torch.tensor([source in sources for source in batch.data_sources])


def _answer(
    batch: SequenceBatch, rows: Tensor, teacher: TeacherEngine | None, plan: DistillationPlan, temperature: float
) -> TeacherScores:
    if teacher is None:
        return TeacherScores(rows=rows)
    numbers = rows.nonzero()[:, 0].tolist()
    if plan.of_sampled_tokens:
        logprobs = torch.zeros(batch.response_mask.shape)
        if numbers:
            logprobs[rows] = teacher.logprobs(batch.rows(numbers), temperature)
        return TeacherScores(rows=rows, logprobs=logprobs)
    assert plan.top_k is not None, "a teacher of the whole vocabulary is computed beside the student"
    top = torch.zeros(*batch.response_mask.shape, 2, plan.top_k)
    if numbers:
        top[rows] = teacher.top_logprobs(batch.rows(numbers), temperature, plan.top_k)
    return TeacherScores(rows=rows, top=top)


def divergence_before_update(
    shaped: ShapedBatch, answers: Mapping[str, TeacherScores], policy: TrainEngine, plan: DistillationPlan
) -> Tensor:
    """The divergence at every sampled token that is not rejected, of the policy that the step begins with, [B, T] nats.

    It is measured by the trainer's log-probs; by the sampler's where these are taken for the old ones.
    """
    batch = shaped.sequences
    mask = shaped.logprobs.kept(batch.response_mask)
    if plan.of_sampled_tokens:
        old = batch.rollout_logprobs if shaped.logprobs.old is None else shaped.logprobs.old
        return sampled_divergence(old, answers, mask, plan)
    return torch.where(mask, policy.divergence(batch, answers, plan), 0.0)


def with_teachers(shaped: ShapedBatch, roles: Roles, plan: StepPlan, clock: PhaseClock) -> ShapedBatch:
    """The batch with the answers of the teachers, where there are any: for the loss, or as what advantages are reduced by."""
    teaching = plan.distillation
    if teaching is None:
        return shaped
    with clock.phase("teachers"):
        # log pi_teacher
        answers = ask_teachers(shaped.sequences, roles.teachers, teaching, plan.teacher_sources)
        if teaching.as_loss:
            return replace(shaped, teachers=answers, teachers_alone=teaching.alone)
        divergence = divergence_before_update(shaped, answers, roles.policy, teaching)
    penalty = teaching.coef * divergence
    return replace(shaped, divergence=divergence, penalty=penalty, teachers_alone=teaching.alone)
