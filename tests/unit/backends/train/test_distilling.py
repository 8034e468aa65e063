"""Teachers beside the student in the local engine: values and gradients of plain models, whatever the micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from batches import sequence_batch, train_batch
from posttrain.algos.distillation import Comparison, compare
from posttrain.backends.torch_training.scoring import LogprobScorer
from posttrain.backends.torch_training.sharding import Sharding
from posttrain.backends.train.local import LocalTrainEngine
from posttrain.config.policy import OptimizerConfig
from posttrain.models.loading import load_causal_lm
from posttrain.models.tiny import write_tiny_model
from posttrain.records.batches import TrainBatch
from posttrain.records.plans import DistillationPlan, LossPlan
from posttrain.registry import DIVERGENCES
from posttrain.steps.teachers import ask_teachers

PROMPTS, RESPONSES = [4, 4, 9, 6], [5, 3, 2, 8]
SOURCES = ("math", "math", "code", "code")


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in ("one", "two")}
    return {
        name: write_tiny_model(folder, "llama", seed=seed) for seed, (name, folder) in enumerate(folders.items(), 1)
    }


def make_batch() -> TrainBatch:
    generator = torch.Generator().manual_seed(0)
    width, length = max(PROMPTS), max(RESPONSES)
    mask = torch.arange(length) < torch.tensor(RESPONSES)[:, None]
    mask[3, 2:4] = False  # what an environment said
    tokens = torch.randint(0, 256, (4, width + length), generator=generator)
    tokens[1, :width] = tokens[0, :width]  # rows 0 and 1 share a prompt
    sequences = sequence_batch(
        tokens=tokens,
        prompt_lengths=torch.tensor(PROMPTS),
        response_mask=mask,
        group_index=torch.tensor([0, 0, 1, 2]),
        data_sources=SOURCES,
    )
    return train_batch(sequences)


def a_plan(name: str, **given: Any) -> DistillationPlan:
    usual = {"teachers": {"one": 1.0}, "coef": 0.5, "as_loss": True, "temperature": 0.9}
    return DistillationPlan(name=name, of_sampled_tokens=name == "sampled_kl", **(usual | given))


def loss_of(plan: DistillationPlan) -> LossPlan:
    return LossPlan(name="cross_entropy", aggregation="token_mean", temperature=1.0, policy_coef=0.0, distillation=plan)


def engine_of(
    student: Path, micro: int, models: dict[str, LogprobScorer] | None = None, **how: Any
) -> LocalTrainEngine:
    return LocalTrainEngine(
        load_causal_lm(str(student), dtype=torch.float32),
        AutoTokenizer.from_pretrained(student),
        optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.0, max_grad_norm=None),
        learning_rate_factor=lambda number: 1.0,
        sequences_per_micro_batch=micro,
        sequences_per_scoring_batch=2,
        teachers=models,
        **how,
    )


def scorers(teachers: dict[str, Path]) -> dict[str, LogprobScorer]:
    return {
        name: LogprobScorer(load_causal_lm(str(folder), dtype=torch.float32).requires_grad_(False), 2)
        for name, folder in teachers.items()
    }


def learned(
    student: Path, teachers: dict[str, Path], plan: DistillationPlan, micro: int = 4, whole: bool = False, **how: Any
) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, mean divergence and gradients of one mini-batch."""
    batch, models = make_batch(), scorers(teachers)
    if whole:
        models["one"].head = "a reason"
    asked = not plan.of_sampled_tokens and plan.top_k is None
    engine = engine_of(student, micro, models if asked else None, **how)
    sources = {"two": frozenset({"code"})}
    answers = ask_teachers(batch.sequences, {} if asked else models, plan, sources)
    batch = replace(batch, teachers=answers)
    stats = engine.forward_backward(batch, loss_of(plan), batch.counts())
    gradients = {name: each.grad.clone() for name, each in engine._masters.parameters.items() if each.grad is not None}
    return stats.loss, stats.sums["distillation/divergence"] / stats.tokens, gradients


@cache
def plain_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def plain(student: Path, teachers: dict[str, Path], plan: DistillationPlan) -> tuple[float, dict[str, Tensor]]:
    """The same by the unmodified models, a row at a time, on whole logits."""
    batch = make_batch().sequences
    model = AutoModelForCausalLM.from_pretrained(student)
    how = Comparison(
        divergence=DIVERGENCES.get(plan.name),
        temperature=plan.temperature,
        teacher_temperature=plan.teacher_temperature,
        top_k=plan.top_k,
        rest=plan.rest,
    )
    total = torch.zeros(())
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        ids = batch.tokens[row, batch.prompt_width - prompt : batch.prompt_width + response][None]
        kept = batch.response_mask[row, :response]
        for name, weight in plan.teachers.items():
            if name == "two" and SOURCES[row] != "code":
                continue
            with torch.no_grad():
                theirs = plain_model(teachers[name])(ids).logits[0, prompt - 1 : -1][kept]
            total = total + weight * compare(model(ids).logits[0, prompt - 1 : -1][kept], theirs, how).sum()
    loss = plan.coef * total / int(batch.response_mask.sum())
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def same(one: dict[str, Tensor], other: dict[str, Tensor], within: float = 2e-4) -> None:
    for name, gradient in other.items():
        assert (one[name] - gradient).norm() <= within * gradient.norm() + 1e-9, name


@pytest.mark.parametrize(
    "given",
    [
        {"name": "reverse_kl"},
        {"name": "forward_kl", "top_k": 5, "rest": "renormalize"},
        {"name": "jensen_shannon", "top_k": 300 - 41, "teacher_temperature": 0.8},
        {"name": "adaptive_kl", "teachers": {"one": 0.7, "two": 2.0}},
        {"name": "forward_kl", "top_k": 7, "teachers": {"one": 0.7, "two": 2.0}},
    ],
    ids=["whole", "top", "top of all", "two teachers", "two teachers' top"],
)
def test_loss_and_gradients_are_those_of_plain_models(
    given: dict[str, Any], tiny_llama: Path, teachers: dict[str, Path]
) -> None:
    plan = a_plan(**given)
    loss, divergence, gradients = learned(tiny_llama, teachers, plan, micro=3)
    expected, of_plain = plain(tiny_llama, teachers, plan)
    assert loss == pytest.approx(expected, rel=2e-5)
    assert divergence == pytest.approx(expected / plan.coef, rel=2e-5)
    same(gradients, of_plain)


@pytest.mark.parametrize("top_k", [None, 5])
def test_micro_batches_padding_and_logits_change_nothing(
    top_k: int | None, tiny_llama: Path, teachers: dict[str, Path]
) -> None:
    plan = a_plan("jensen_shannon", top_k=top_k, teachers={"one": 1.0, "two": 0.5})
    loss, _, gradients = learned(tiny_llama, teachers, plan)
    for changed in ({"micro": 1, "share_prompts": False}, {"padded": True}, *([] if top_k else [{"whole": True}])):
        other, _, of_other = learned(tiny_llama, teachers, plan, **changed)
        assert other == pytest.approx(loss, rel=1e-5), changed
        same(of_other, gradients)


def test_a_model_is_no_distance_from_itself(tiny_llama: Path) -> None:
    loss, _, gradients = learned(tiny_llama, {"one": tiny_llama}, a_plan("reverse_kl"))
    assert loss == pytest.approx(0.0, abs=1e-7)
    assert all(gradient.abs().max() < 1e-6 for gradient in gradients.values())


def test_the_divergence_before_an_update_is_that_of_the_loss(tiny_llama: Path, teachers: dict[str, Path]) -> None:
    plan, batch, models = a_plan("reverse_kl", clip=0.7), make_batch(), scorers(teachers)
    engine = engine_of(tiny_llama, 4, models)
    found = engine.divergence(batch.sequences, ask_teachers(batch.sequences, {}, plan, {}), plan)
    assert found.max() == pytest.approx(0.7)
    assert not found[~batch.loss_mask].any()
    _, mean, _ = learned(tiny_llama, teachers, plan)
    assert float(found.sum()) / int(batch.loss_mask.sum()) == pytest.approx(mean, rel=1e-5)


def test_top_logprobs_are_the_plain_model_s(tiny_llama: Path) -> None:
    batch = make_batch().sequences
    scorer = LogprobScorer(load_causal_lm(str(tiny_llama), dtype=torch.float32), 3)
    found = scorer.top_logprobs(batch, 0.9, 4)
    assert found.shape == (*batch.response_mask.shape, 2, 4)
    assert not found[~batch.response_mask].any()
    ids = batch.tokens[2][None, batch.prompt_width - PROMPTS[2] : batch.prompt_width + RESPONSES[2]]
    top = (plain_model(tiny_llama)(ids).logits[0, PROMPTS[2] - 1 : -1] / 0.9).log_softmax(-1).topk(4)
    assert torch.equal(found[2, : RESPONSES[2], 0].long(), top.indices)
    torch.testing.assert_close(found[2, : RESPONSES[2], 1], top.values.detach(), rtol=0, atol=1e-4)


def test_a_process_without_rows_joins_the_most_likely_tokens_in_their_shape(teachers: dict[str, Path]) -> None:
    """Fewer micro-batches than processes: [0, T, 2, k], not [0, T], or the processes' sums would differ in size."""

    class Idle(Sharding):
        """The second of two processes, dealt an empty micro-batch."""

        shapes: tuple[int, ...] = ()

        def deal(self, parts: list[list[int]], loads: Sequence[int]) -> list[list[int]]:
            return [[]]

        def joined(self, values: Tensor, rows: Sequence[int], count: int) -> Tensor:
            self.shapes = tuple(values.shape)
            return super().joined(values, rows, count)

    sharding, batch = Idle(), make_batch().sequences
    scorer = LogprobScorer(load_causal_lm(str(teachers["one"]), dtype=torch.float32), 4, sharding=sharding)
    length = batch.response_mask.shape[1]
    assert scorer.top_logprobs(batch, 1.0, 5).shape == (4, length, 2, 5) and sharding.shapes == (0, length, 2, 5)
    assert scorer.logprobs(batch, 1.0).shape == (4, length) and sharding.shapes == (0, length)


def test_the_most_likely_tokens_are_ones_that_the_student_knows(teachers: dict[str, Path]) -> None:
    """A teacher with 11 tokens besides, all of them likely: their answers are those of its logits without these."""
    model = load_causal_lm(str(teachers["one"]), dtype=torch.float32)
    size = model.config.vocab_size
    batch = make_batch().sequences
    expected = LogprobScorer(model, 2).top_logprobs(batch, 0.9, 5)
    with torch.no_grad():
        model.resize_token_embeddings(size + 11, mean_resizing=False)
        model.get_output_embeddings().weight[size:] = 5 * model.get_output_embeddings().weight[:11]
    larger = LogprobScorer(model, 2)
    assert (larger.top_logprobs(batch, 0.9, 5)[:, :, 0] >= size).any()
    larger.vocabulary = size
    torch.testing.assert_close(larger.top_logprobs(batch, 0.9, 5), expected)
