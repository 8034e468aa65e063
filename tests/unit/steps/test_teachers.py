"""Teachers of sampled responses in a step: the rows of each, and the advantages that their divergence leaves, by hand."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from batches import scored_batch, sequence_batch, shaped_batch
from posttrain.records.batches import SequenceBatch, ShapedBatch, TeacherScores, TrainerLogprobs
from posttrain.records.plans import AdvantagePlan, DistillationPlan
from posttrain.steps.advantage import estimate_advantages
from posttrain.steps.teachers import ask_teachers, with_teachers

OLD = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, -1.0, 9.0]])
SAMPLER = torch.tensor([[-1.5, -2.0, -0.5], [-3.0, -1.5, 9.0]])
THEIRS = torch.tensor([[-2.0, -1.0, -0.5], [-1.0, -1.0, 7.0]])
CLOCK: Any = SimpleNamespace(phase=lambda *_, **__: nullcontext())


class Teacher:
    """Answers with a table, and remembers the rows and the temperature of each request."""

    def __init__(self, table: Tensor = THEIRS) -> None:
        self.table, self.asked = table, list[tuple[tuple[str, ...], float]]()

    def logprobs(self, batch: SequenceBatch, temperature: float) -> Tensor:
        self.asked.append((batch.sample_ids, temperature))
        return self.table[[int(name) for name in batch.sample_ids]]

    def top_logprobs(self, batch: SequenceBatch, temperature: float, k: int) -> Tensor:
        self.asked.append((batch.sample_ids, temperature))
        return self.logprobs(batch, temperature)[:, :, None, None].expand(-1, -1, 2, k)


class Policy:
    """A policy that computes the divergence itself."""

    def divergence(self, batch: SequenceBatch, answers: Any, plan: DistillationPlan) -> Tensor:
        return torch.full(batch.response_mask.shape, 0.25)


def plan_of(**given: Any) -> DistillationPlan:
    usual: dict[str, Any] = {
        "name": "sampled_kl",
        "of_sampled_tokens": True,
        "teachers": {"big": 1.0},
        "as_loss": False,
    }
    return DistillationPlan(**(usual | given))


def batch() -> SequenceBatch:
    """Two responses to one prompt, of 3 and of 2 tokens."""
    return sequence_batch(
        tokens=torch.zeros(2, 4, dtype=torch.int64),
        prompt_lengths=torch.tensor([1, 1]),
        response_mask=torch.tensor([[True, True, True], [True, True, False]]),
        rollout_logprobs=SAMPLER,
        group_index=torch.tensor([0, 0]),
        data_sources=("math", "code"),
    )


def taught(plan: DistillationPlan, teacher: Teacher | None = None, **given: Any) -> ShapedBatch:
    logprobs = given.pop("logprobs", TrainerLogprobs(old=OLD))
    shaped = shaped_batch(scored_batch(batch(), **given), logprobs)
    teachers = {} if plan.in_forward_pass else {name: teacher or Teacher() for name in plan.teachers}
    roles: Any = SimpleNamespace(teachers=teachers, policy=Policy())
    step: Any = SimpleNamespace(distillation=plan, teacher_sources=given.get("sources", {}))
    return with_teachers(shaped, roles, step, CLOCK)


def advantages(shaped: ShapedBatch, name: str = "grpo") -> list[list[float]]:
    plan = AdvantagePlan(name=name, parameters={"normalize_by_std": False})
    return estimate_advantages(shaped, None, plan).advantages.tolist()


def test_alone_the_advantage_is_minus_the_weighted_reverse_kl_of_the_sampled_tokens() -> None:
    # k1 = log p - log q: (-1 + 2, -2 + 1, 0) and (-3 + 1, 0); times 0.5, and taken from 0, whatever the rewards are
    shaped = taught(plan_of(alone=True, coef=0.5), rewards=torch.tensor([1.0, 0.0]))
    assert shaped.divergence is not None and shaped.divergence.tolist() == [[1.0, -1.0, 0.0], [-2.0, 0.0, 0.0]]
    assert advantages(shaped) == [[-0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]


def test_with_rewards_it_is_taken_from_the_estimators_advantage() -> None:
    # Rewards 1 and 0: advantages 0.5 and -0.5
    shaped = taught(plan_of(coef=0.5), rewards=torch.tensor([1.0, 0.0]))
    assert advantages(shaped) == [[0.0, 1.0, 0.5], [0.5, -0.5, 0.0]]


def test_without_recomputed_log_probs_the_samplers_are_compared() -> None:
    # (-1.5 + 2, -2 + 1, 0) and (-3 + 1, -1.5 + 1)
    shaped = taught(plan_of(alone=True), logprobs=TrainerLogprobs())
    assert shaped.divergence is not None and shaped.divergence.tolist() == [[0.5, -1.0, 0.0], [-2.0, -0.5, 0.0]]


def test_rejected_tokens_and_invalid_rewards() -> None:
    rejected = torch.tensor([[True, False, False], [False, False, False]])
    valid = torch.tensor([True, False])
    logprobs = TrainerLogprobs(old=OLD, rejected=rejected)
    alone = taught(plan_of(alone=True), valid=valid, logprobs=logprobs)
    # A response without a valid reward is learned from, a rejected token is not.
    assert advantages(alone) == [[0.0, 1.0, 0.0], [2.0, 0.0, 0.0]]
    assert alone.loss_mask.tolist() == [[False, True, True], [True, True, False]]
    mixed = taught(plan_of(), valid=valid, logprobs=logprobs)
    assert mixed.loss_mask.tolist() == [[False, True, True], [False, False, False]]
    assert advantages(mixed)[1] == [0.0, 0.0, 0.0]


def test_a_divergence_over_the_vocabulary_is_the_policys_own() -> None:
    shaped = taught(plan_of(name="reverse_kl", of_sampled_tokens=False, alone=True, coef=2.0))
    assert advantages(shaped) == [[-0.5, -0.5, -0.5], [-0.5, -0.5, 0.0]]


def test_in_the_loss_the_answers_go_with_the_batch_and_advantages_stay() -> None:
    shaped = taught(plan_of(as_loss=True), rewards=torch.tensor([1.0, 0.0]))
    assert shaped.penalty is None and shaped.teachers["big"].logprobs is not None
    assert shaped.teachers["big"].logprobs.tolist() == THEIRS.tolist()
    assert advantages(shaped) == [[0.5, 0.5, 0.5], [-0.5, -0.5, 0.0]]


def test_a_teacher_is_asked_for_its_own_rows_at_both_temperatures() -> None:
    maths, both = Teacher(), Teacher()
    plan = plan_of(teachers={"maths": 1.0, "both": 1.0}, temperature=0.5, teacher_temperature=4.0)
    found = ask_teachers(batch(), {"maths": maths, "both": both}, plan, {"maths": frozenset({"math", "more"})})
    assert maths.asked == [(("0",), 2.0)] and both.asked == [(("0", "1"), 2.0)]
    assert found["maths"].rows.tolist() == [True, False] and found["both"].rows.tolist() == [True, True]
    assert found["maths"].logprobs is not None and found["maths"].logprobs.tolist() == [THEIRS[0].tolist(), [0.0] * 3]


def test_a_teacher_without_rows_in_the_step_is_not_asked() -> None:
    for of_sampled_tokens in (True, False):
        teacher = Teacher()
        plan = plan_of(of_sampled_tokens=of_sampled_tokens, top_k=2)
        found = ask_teachers(batch(), {"big": teacher}, plan, {"big": frozenset({"poems"})})["big"]
        assert not teacher.asked and not found.rows.any()
        answer = found.logprobs if of_sampled_tokens else found.top
        assert answer is not None and not answer.any()


@pytest.mark.parametrize("top_k", [None, 2])
def test_the_most_likely_tokens_are_asked_for_and_a_teacher_beside_the_student_is_not(top_k: int | None) -> None:
    teacher = Teacher()
    plan = plan_of(name="forward_kl", of_sampled_tokens=False, top_k=top_k)
    found = ask_teachers(batch(), {"big": teacher} if top_k else {}, plan, {"big": frozenset({"code"})})["big"]
    assert isinstance(found, TeacherScores) and found.rows.tolist() == [False, True] and found.logprobs is None
    if top_k:
        assert found.top is not None and found.top.shape == (2, 3, 2, 2) and not found.top[0].any()
    else:
        assert found.top is None
