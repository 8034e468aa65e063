"""Prompts with images: a GRPO step of the real stages and engine equals a calculation written out here.

The calculation uses the unmodified Hugging Face model, one sequence at a time, with the image processor's arrays as they are,
no padding and no packing, in float64. The engine computes in float32, so numbers agree to float32's rounding.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoTokenizer

from batches import advantages_of, compared
from posttrain.backends.rollout.hf import HuggingFaceEngine
from posttrain.backends.rollout.native import NativeEngine
from posttrain.backends.torch_training.scoring import LogprobScorer
from posttrain.backends.train.local import LocalTrainEngine
from posttrain.backends.weight_sync.in_memory import InMemorySync
from posttrain.config.data import DataConfig
from posttrain.config.lora import LoraConfig
from posttrain.config.model import ModelConfig
from posttrain.config.policy import OptimizerConfig
from posttrain.data.images import ImageFile
from posttrain.errors import ModelError
from posttrain.interfaces.roles import Roles
from posttrain.models.loading import load_causal_lm, load_model_config
from posttrain.models.lora import adapter_layers, adapter_off, add_adapter
from posttrain.models.merging import merge_saved_adapter
from posttrain.models.processors import load_processor
from posttrain.models.tiny import write_tiny_model
from posttrain.models.tiny_vision import PLACEHOLDERS, write_tiny_vision_model
from posttrain.models.vision import freeze_vision
from posttrain.records.plans import AdvantagePlan, LossPlan, UpdatePlan
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import (
    Outcome,
    Reward,
    SamplingParams,
    ScoredGroup,
    StopReason,
    Trajectory,
    TrajectoryGroup,
)
from posttrain.steps.advantage import estimate_advantages
from posttrain.steps.assemble import assemble
from posttrain.steps.measure import gap_metrics
from posttrain.steps.rl_step import collect
from posttrain.steps.score import score
from posttrain.steps.update import update

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm"]
TEMPERATURE, KL_COEF = 0.8, 0.05
SIZES: list[list[tuple[int, int]]] = [[(32, 24)], [(16, 32), (16, 16)], []]  # width and height of each prompt's images
REWARDS = [[1.0, 0.0, 0.5], [0.0, 2.0, 1.0], [1.0, 0.3, 0.0]]
RESPONSE_LENGTHS = [[3, 7, 1], [2, 5, 4], [6, 1, 3]]
OPTIMIZER = OptimizerConfig(lr=3e-3, betas=(0.9, 0.98), eps=1e-4, weight_decay=0.1, max_grad_norm=0.5)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_vision_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_vision_model(tmp_path_factory.mktemp("qwen"), "qwen2_vl")


def random_image(seed: int, width: int, height: int) -> ImageFile:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return ImageFile(content=buffer.getvalue(), width=width, height=height)


def prompt_with(folder: Path, name: str, sizes: Sequence[tuple[int, int]], seed: int) -> Prompt:
    model = ModelConfig(path=str(folder))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    processor = load_processor(model, tokenizer, DataConfig(train_files=[]))
    assert processor is not None
    files = [random_image(seed + number, *size) for number, size in enumerate(sizes)]
    family = load_model_config(str(folder)).model_type
    text = PLACEHOLDERS[family] * len(files) + "how many circles?"
    text = processor.expand(text, [(file.width, file.height) for file in files])
    ids = tuple(tokenizer(text, add_special_tokens=False).input_ids)
    images = processor.prompt_images(files) if files else None
    return Prompt(prompt_id=name, token_ids=ids, text=text, data_source="shapes", images=images)


def scored_groups(folder: Path) -> list[ScoredGroup]:
    generator = torch.Generator().manual_seed(3)
    groups = []
    for number, (sizes, rewards, lengths) in enumerate(zip(SIZES, REWARDS, RESPONSE_LENGTHS, strict=True)):
        prompt = prompt_with(folder, f"train:{number}", sizes, seed=10 * number)
        trajectories = tuple(
            Trajectory(
                sample_id=f"{prompt.prompt_id}/{sample}",
                token_ids=tuple(torch.randint(0, 256, (length,), generator=generator).tolist()),
                logprobs=(-1.0,) * length,
                text="",
                stop_reason=StopReason.LENGTH,
                policy_version=0,
            )
            for sample, length in enumerate(lengths)
        )
        group = TrajectoryGroup(prompt=prompt, trajectories=trajectories)
        groups.append(ScoredGroup(group=group, outcomes=tuple(Reward(reward) for reward in rewards)))
    return groups


# ------------------------------------------------------------------------------------------ the plain calculation


def plain_inputs(prompt: Prompt, response: Sequence[int], image_token: int) -> dict[str, Tensor]:
    ids = torch.tensor([[*prompt.token_ids, *response]])
    if prompt.images is None:
        return {"input_ids": ids}
    arrays = {name: torch.tensor(array) for name, array in prompt.images.features.items()}
    if "image_grid_thw" in arrays:
        arrays["mm_token_type_ids"] = (ids == image_token).int()
    return {"input_ids": ids, **arrays}


def plain_logprobs(model: Any, prompt: Prompt, response: Sequence[int]) -> Tensor:
    """[T] nats at the step's temperature."""
    model.model.rope_deltas = None  # what an earlier call left would be taken for this one's
    logits = model(**plain_inputs(prompt, response, model.config.image_token_id)).logits[0] / TEMPERATURE
    log_p = logits.log_softmax(-1)[len(prompt.token_ids) - 1 : -1]
    return log_p[torch.arange(len(response)), torch.tensor(response)]


def plain_step(folder: Path, reference: Path, groups: list[ScoredGroup]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one on-policy step: A = (r - mean) / (std + 1e-6), ratio 1, mean over all response tokens, k3."""
    load = partial(AutoModelForImageTextToText.from_pretrained, dtype=torch.float64, experts_implementation="eager")
    model: Any = load(folder, attn_implementation="eager")
    other: Any = load(reference, attn_implementation="sdpa")
    loss, count = torch.zeros((), dtype=torch.float64), sum(map(sum, RESPONSE_LENGTHS))
    for group, rewards in zip(groups, REWARDS, strict=True):
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
        for trajectory, reward in zip(group.group.trajectories, rewards, strict=True):
            logprobs = plain_logprobs(model, group.group.prompt, trajectory.token_ids)
            with torch.no_grad():
                d = plain_logprobs(other, group.group.prompt, trajectory.token_ids)
            d = d - logprobs
            ratio = (logprobs - logprobs.detach()).exp()
            advantage = (reward - mean) / (std + 1e-6)
            loss = loss + (-advantage * ratio + KL_COEF * (d.exp() - 1 - d)).sum() / count
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.fixture(scope="module")
def reference(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy's model, a little way off."""
    return moved_model(folder, tmp_path_factory.mktemp("reference"))


def moved_model(folder: Path, to: Path) -> Path:
    model = AutoModelForImageTextToText.from_pretrained(folder)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.01 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(to)
    return to


@pytest.fixture(scope="module")
def groups(folder: Path) -> list[ScoredGroup]:
    return scored_groups(folder)


@pytest.fixture(scope="module")
def expected(folder: Path, reference: Path, groups: list[ScoredGroup]) -> tuple[float, dict[str, Tensor]]:
    return plain_step(folder, reference, groups)


# ------------------------------------------------------------------------------------------------- the real thing


def make_engine(folder: Path, micro_batch: int = 9, model: Any = None, **how: Any) -> LocalTrainEngine:
    return LocalTrainEngine(
        model or load_causal_lm(str(folder), dtype=torch.float32),
        AutoTokenizer.from_pretrained(folder),
        optimizer=OPTIMIZER,
        learning_rate_factor=lambda update_number: 1.0,
        sequences_per_micro_batch=micro_batch,
        sequences_per_scoring_batch=4,
        **how,
    )


def loss_plan(kl_coef: float = KL_COEF) -> LossPlan:
    return LossPlan(
        name="ppo_clip",
        parameters={"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "dual_clip": None},
        aggregation="token_mean",
        temperature=TEMPERATURE,
        kl_coef=kl_coef,
    )


def engine_step(
    engine: LocalTrainEngine, reference: LogprobScorer | None, groups: list[ScoredGroup]
) -> tuple[float, dict[str, Tensor]]:
    plan = UpdatePlan(loss=loss_plan(KL_COEF if reference else 0.0), epochs=1, sequences_per_update=9, on_policy=True)
    train = estimate_advantages(compared(assemble(groups), engine, reference, plan), None, AdvantagePlan(name="grpo"))
    stats = engine.forward_backward(train, plan.loss, train.counts())
    return stats.loss, {n: w.grad for n, w in engine.model.named_parameters() if w.grad is not None}


def check_equal(found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name].double(), gradient.double(), rtol=1e-3, atol=2e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [1, 4, 9])
@pytest.mark.parametrize("how", [{}, {"share_prompts": False}, {"padded": True}], ids=["shared", "packed", "padded"])
def test_loss_and_gradients_equal_the_plain_calculation(
    folder: Path,
    reference: Path,
    groups: list[ScoredGroup],
    expected: tuple[float, dict[str, Tensor]],
    how: dict[str, bool],
    micro_batch: int,
) -> None:
    scorer = LogprobScorer(load_causal_lm(str(reference), dtype=torch.float32), 4, **how)
    check_equal(engine_step(make_engine(folder, micro_batch, **how), scorer, groups), expected)
    tower = [name for name in expected[1] if "visual" in name or "vision" in name]
    assert max(float(expected[1][name].abs().max()) for name in tower) > 0.01  # far above the tolerance


def test_the_plain_calculation_sees_the_images(folder: Path, groups: list[ScoredGroup]) -> None:
    """Other pixels give other log-probs to the responses behind them, and to no others."""
    engine = make_engine(folder)
    batch = assemble(groups).sequences
    assert batch.images and batch.images[0] is not None
    before = engine.logprobs(batch, 1.0)
    first = batch.images[0].features
    other = replace(
        batch.images[0], features={**first, "pixel_values": -first["pixel_values"]}, content_hash="negative"
    )
    after = engine.logprobs(replace(batch, images=(other,) * 3 + batch.images[3:]), 1.0)
    assert float((after[:3] - before[:3]).abs().max()) > 1e-2
    torch.testing.assert_close(after[3:], before[3:], rtol=0, atol=1e-5)


def test_gradient_checkpointing_gives_the_same(
    qwen: Path,
) -> None:
    groups = scored_groups(qwen)
    with_it = engine_step(make_engine(qwen, 4, gradient_checkpointing=True), None, groups)
    check_equal(with_it, engine_step(make_engine(qwen, 4), None, groups))


def test_a_frozen_tower_stays_and_a_trained_one_moves(folder: Path, groups: list[ScoredGroup]) -> None:
    plan = UpdatePlan(loss=loss_plan(0.0), epochs=1, sequences_per_update=9, on_policy=True)
    for frozen in (False, True):
        model = load_causal_lm(str(folder), dtype=torch.float32)
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        if frozen:
            freeze_vision(model)
        engine = make_engine(folder, model=model)
        update(engine, advantages_of(assemble(groups), AdvantagePlan(name="grpo")), plan)
        moved = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
        sees = {name for name in before if any(part in name for part in ("visual", "vision_model", "connector"))}
        assert len(sees) > 10
        assert moved & sees == (set() if frozen else sees)
        assert moved - sees == before.keys() - sees


def test_there_is_nothing_to_freeze_in_a_text_model(tiny_llama: Path) -> None:
    with pytest.raises(ModelError, match="no vision tower"):
        freeze_vision(load_causal_lm(str(tiny_llama), dtype=torch.float32))


# ------------------------------------------------------------------------------------------------------- sampling


class Arbitrary:
    """A reward that differs within a group."""

    def score(self, groups: Sequence[TrajectoryGroup]) -> list[tuple[Outcome, ...]]:
        return [tuple(Reward(float(sum(each.token_ids) % 7)) for each in group.trajectories) for group in groups]


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [NativeEngine, HuggingFaceEngine])
def test_gap_before_and_after_an_update_is_rounding(folder: Path, sampler: Any) -> None:
    model = load_causal_lm(str(folder), dtype=torch.float32)
    engine = make_engine(folder, 5, model)
    rollout = sampler(model, engine.tokenizer, max_concurrent_sequences=5, max_prefill_tokens=60)
    assert "own modules" not in rollout.note  # the native engine's fast pass is right for the language model
    roles = Roles(policy=engine, rollout=rollout, weight_sync=InMemorySync(), reference=None, device="cpu")
    # The same tokens, other pixels: prompts that only their images tell apart.
    prompts = [prompt_with(folder, f"p:{n}", sizes, n) for n, sizes in enumerate([*SIZES, SIZES[0]])]
    assert prompts[0].token_ids == prompts[3].token_ids
    sampling = SamplingParams(samples_per_prompt=3, max_response_tokens=10, seed=5, temperature=TEMPERATURE)
    plan = UpdatePlan(loss=loss_plan(0.0), epochs=1, sequences_per_update=6, on_policy=False)
    for expected_version in (0, 2):
        found = collect(roles, prompts, sampling)
        assert {t.policy_version for group in found for t in group.trajectories} == {expected_version}
        assert found[0].trajectories[0].logprobs[0] != found[3].trajectories[0].logprobs[0]
        shaped = compared(assemble(score(found, Arbitrary())), engine, None, plan)
        batch = shaped.sequences
        stats = update(engine, estimate_advantages(shaped, None, AdvantagePlan(name="grpo")), plan)
        gap = gap_metrics(batch.rollout_logprobs, stats.trainer_logprobs, batch.response_mask)
        assert 0 < gap["gap/max"] < 1e-4
        roles.weight_sync.publish(engine, rollout)


# --------------------------------------------------------------------------------------- adapters and checkpoints


def test_an_adapter_is_on_the_language_model_alone(folder: Path, groups: list[ScoredGroup], tmp_path: Path) -> None:
    model = load_causal_lm(str(folder), dtype=torch.float32)
    add_adapter(model, LoraConfig(rank=2, exclude_modules=["o_proj"]))
    names = [name for name, _ in adapter_layers(model)]
    mlp = 0 if "moe" in model.config.model_type else 3  # gate, up, down; experts are no layers of their own
    assert len(names) == 2 * (3 + mlp)  # 2 layers x (q, k, v, ...)
    assert all("language_model" in name or "text_model" in name for name in names)
    engine = make_engine(folder, model=model)
    reference = LogprobScorer(model, 4, weights=lambda: adapter_off(model))
    before = reference.logprobs(assemble(groups).sequences, 1.0)
    plan = UpdatePlan(loss=loss_plan(), epochs=1, sequences_per_update=9, on_policy=True)
    train = estimate_advantages(compared(assemble(groups), engine, reference, plan), None, AdvantagePlan(name="grpo"))
    update(engine, train, plan)
    assert torch.equal(reference.logprobs(assemble(groups).sequences, 1.0), before)
    learned = engine.logprobs(assemble(groups).sequences, 1.0)
    assert float((learned - before).abs().max()) > 1e-3
    saved, merged = tmp_path / "adapter", tmp_path / "merged"
    saved.mkdir()
    engine.save(saved)
    merge_saved_adapter(saved, merged)
    torch.testing.assert_close(
        make_engine(merged).logprobs(assemble(groups).sequences, 1.0), learned, rtol=0, atol=1e-4
    )
    assert (merged / "preprocessor_config.json").is_file()


def test_a_checkpoint_is_a_whole_folder_and_resumes(folder: Path, groups: list[ScoredGroup], tmp_path: Path) -> None:
    plan = UpdatePlan(loss=loss_plan(0.0), epochs=1, sequences_per_update=9, on_policy=True)
    train = advantages_of(assemble(groups), AdvantagePlan(name="grpo"))
    engine = make_engine(folder)
    update(engine, train, plan)
    engine.save(tmp_path)
    resumed = make_engine(folder)
    resumed.load(tmp_path)
    for each in (engine, resumed):
        update(each, train, plan)
    weights = dict(resumed.model.named_parameters())
    assert all(torch.equal(weights[name], weight) for name, weight in engine.model.named_parameters())
    # The folder before that second update, as anyone loads it, computes what the engine did.
    plain: Any = AutoModelForImageTextToText.from_pretrained(tmp_path)
    resumed.load(tmp_path)
    prompt, response = groups[1].group.prompt, groups[1].group.trajectories[1].token_ids
    with torch.no_grad():
        wanted = plain_logprobs(plain, prompt, response)
    found = resumed.logprobs(assemble(groups).sequences, TEMPERATURE)[4, : len(response)]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    processor = load_processor(
        ModelConfig(path=str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path), DataConfig(train_files=[])
    )
    assert processor is not None


# ------------------------------------------------------------------------------------------------ what is refused


def test_images_for_a_text_model_are_refused(qwen: Path, tmp_path: Path) -> None:
    groups = scored_groups(qwen)
    engine = make_engine(write_tiny_model(tmp_path, "qwen2"))
    with pytest.raises(ModelError, match=r"qwen2 .* was given images, which are supported for Qwen2-VL"):
        engine.logprobs(assemble(groups).sequences, 1.0)


def test_a_prompt_that_lost_image_tokens_is_refused(qwen: Path) -> None:
    batch = assemble(scored_groups(qwen)).sequences
    image = load_causal_lm(str(qwen), dtype=torch.float32).config.image_token_id
    batch.tokens[0, (batch.tokens[0] == image).nonzero()[0, 0]] = 65
    with pytest.raises(ModelError, match="has 11 image tokens, and the model makes 12 features"):
        make_engine(qwen).logprobs(batch, 1.0)
