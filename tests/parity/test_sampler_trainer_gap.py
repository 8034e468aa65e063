"""The sampler's log-probs are the trainer's, for the same tokens and weights: below 1e-4 nats in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from batches import advantages_of, compared
from posttrain.backends.rollout.native import NativeEngine
from posttrain.backends.train.local import LocalTrainEngine
from posttrain.backends.weight_sync.in_memory import InMemorySync
from posttrain.config.policy import OptimizerConfig
from posttrain.errors import RunStopped
from posttrain.interfaces.roles import Roles
from posttrain.models.loading import load_causal_lm
from posttrain.models.tiny import FAMILIES, draw_weights, tiny_tokenizer, write_tiny_model
from posttrain.records.plans import AdvantagePlan, LossPlan, UpdatePlan
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Outcome, Reward, SamplingParams, TrajectoryGroup
from posttrain.steps.advantage import estimate_advantages
from posttrain.steps.assemble import assemble
from posttrain.steps.measure import gap_metrics
from posttrain.steps.rl_step import collect
from posttrain.steps.score import score
from posttrain.steps.update import update

TOKENIZER = tiny_tokenizer()
SAMPLING = SamplingParams(samples_per_prompt=4, max_response_tokens=24, seed=5)


class Arbitrary:
    """A reward that differs within a group."""

    def score(self, groups: Sequence[TrajectoryGroup]) -> list[tuple[Outcome, ...]]:
        return [tuple(Reward(float(sum(each.token_ids) % 7)) for each in group.trajectories) for group in groups]


def make_roles(folder: Path, dtype: torch.dtype = torch.float32) -> Roles:
    model = load_causal_lm(str(folder), dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    policy = LocalTrainEngine(
        model,
        tokenizer,
        optimizer=OptimizerConfig(lr=3e-3),
        learning_rate_factor=lambda update_number: 1.0,
        sequences_per_micro_batch=5,
        sequences_per_scoring_batch=7,
    )
    rollout = NativeEngine(model, tokenizer, max_concurrent_sequences=6, max_prefill_tokens=40)
    return Roles(policy=policy, rollout=rollout, weight_sync=InMemorySync(), reference=None, device="cpu")


def make_prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 17, 5, 30]
    return [
        Prompt(
            prompt_id=f"p:{number}",
            token_ids=tuple(torch.randint(0, 256, (length,), generator=generator).tolist()),
            text="",
            data_source="t",
        )
        for number, length in enumerate(lengths)
    ]


def update_plan(temperature: float, *, sequences_per_update: int = 8) -> UpdatePlan:
    loss = LossPlan(
        name="ppo_clip",
        parameters={"clip_ratio_low": 0.2, "clip_ratio_high": 0.2},
        aggregation="token_mean",
        temperature=temperature,
    )
    return UpdatePlan(
        loss=loss, epochs=1, sequences_per_update=sequences_per_update, on_policy=sequences_per_update == 16
    )


def write_sliding_model(folder: Path, family: str) -> Path:
    """A model whose layers see the last 8 tokens: fewer than the prompts and responses here have."""
    config = AutoConfig.for_model(
        family,
        vocab_size=259,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=8,
        bos_token_id=None,
        eos_token_id=TOKENIZER.eos_token_id,
        pad_token_id=TOKENIZER.pad_token_id,
    )
    model = AutoModelForCausalLM.from_config(config)
    draw_weights(model, 0)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3_text"])
def test_gap_before_and_after_an_update_is_rounding(tmp_path: Path, family: str, temperature: float) -> None:
    write = write_tiny_model if family in FAMILIES else write_sliding_model
    roles = make_roles(write(tmp_path / family, family))
    plan = update_plan(temperature)
    for expected_version in (0, 2):  # a step makes two updates
        groups = collect(roles, make_prompts(), replace(SAMPLING, temperature=temperature))
        assert {t.policy_version for group in groups for t in group.trajectories} == {expected_version}
        shaped = compared(assemble(score(groups, Arbitrary())), roles.policy, None, plan)
        batch = shaped.sequences
        train = estimate_advantages(shaped, None, AdvantagePlan(name="grpo"))
        stats = update(roles.policy, train, plan)
        gap = gap_metrics(batch.rollout_logprobs, stats.trainer_logprobs, batch.response_mask)
        assert 0 < gap["gap/max"] < 1e-4
        assert gap["gap/share_above"] == 0
        roles.weight_sync.publish(roles.policy, roles.rollout)


def test_one_update_per_step_reports_the_same_gap_without_a_scoring_pass(tiny_llama: Path) -> None:
    """On-policy steps take the trainer's log-probs from the update's own forward pass, before the weights move."""
    roles = make_roles(tiny_llama)
    plan = update_plan(1.0, sequences_per_update=16)
    scored = assemble(score(collect(roles, make_prompts(), SAMPLING), Arbitrary()))
    batch = scored.sequences
    scored_apart = roles.policy.logprobs(batch, 1.0)
    shaped = compared(scored, roles.policy, None, plan)
    assert shaped.logprobs.old is None
    stats = update(roles.policy, estimate_advantages(shaped, None, AdvantagePlan(name="grpo")), plan)
    torch.testing.assert_close(stats.trainer_logprobs, scored_apart, rtol=0, atol=2e-5)
    assert gap_metrics(batch.rollout_logprobs, stats.trainer_logprobs, batch.response_mask)["gap/max"] < 1e-4


def test_wrong_temperature_in_the_trainer_shows_in_the_gap(tiny_llama: Path) -> None:
    """The measurement is not blind."""
    roles = make_roles(tiny_llama)
    batch = assemble(score(collect(roles, make_prompts(), SAMPLING), Arbitrary())).sequences
    gap = gap_metrics(batch.rollout_logprobs, roles.policy.logprobs(batch, 0.9), batch.response_mask)
    assert gap["gap/mean"] > 1e-2


def test_collect_refuses_a_sampler_that_was_not_told_of_an_update(tiny_llama: Path) -> None:
    roles = make_roles(tiny_llama)
    plan = update_plan(1.0, sequences_per_update=16)
    batch = assemble(score(collect(roles, make_prompts(), SAMPLING), Arbitrary()))
    update(roles.policy, advantages_of(batch, AdvantagePlan(name="grpo")), plan)
    with pytest.raises(RunStopped, match="serves version 0 of the weights, the trainer holds version 1"):
        collect(roles, make_prompts(), SAMPLING)
    roles.weight_sync.publish(roles.policy, roles.rollout)
    assert collect(roles, make_prompts(), SAMPLING)[0].trajectories[0].policy_version == 1


def test_sampler_uses_the_updated_weights(tiny_llama: Path) -> None:
    """Same prompts and seed, other weights: other log-probs."""
    roles = make_roles(tiny_llama)
    plan = update_plan(1.0, sequences_per_update=16)
    before = collect(roles, make_prompts(), SAMPLING)
    batch = assemble(score(before, Arbitrary()))
    update(roles.policy, advantages_of(batch, AdvantagePlan(name="grpo")), plan)
    roles.weight_sync.publish(roles.policy, roles.rollout)
    after = collect(roles, make_prompts(), SAMPLING)
    assert before[1].trajectories[0].logprobs[0] != after[1].trajectories[0].logprobs[0]
