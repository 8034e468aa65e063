"""What the loop tells every step, and what it says when it gives up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from posttrain.loops.rl_plan import RunPlan, StepPlan
from posttrain.loops.rl_sync import no_update_message
from posttrain.records.batches import SequenceBatch, TrainBatch
from posttrain.records.plans import AdvantagePlan, LossPlan, UpdatePlan
from posttrain.records.trajectories import SamplingParams

SAMPLING = SamplingParams(max_response_tokens=4, seed=1)


@pytest.fixture
def plan() -> RunPlan:
    loss = LossPlan(name="ppo_clip", aggregation="token_mean", temperature=1.0)
    step = StepPlan(
        prompts=1,
        sampling=SAMPLING,
        advantage=AdvantagePlan(name="grpo"),
        update=UpdatePlan(loss=loss, epochs=1, sequences_per_update=1, on_policy=True),
        max_invalid_share=0.5,
    )
    return RunPlan(
        step=step,
        seed=1,
        validation_sampling=SAMPLING,
        validation_prompts=[],
        total_steps=3,
        steps_per_epoch=3,
        max_skipped_steps=3,
        validate_every=None,
        validate_before=False,
        validate_after=False,
        save_every=None,
        save_at_end=False,
        samples_every=None,
    )


def test_every_step_and_every_run_seed_has_its_own_sampling_seed(plan: RunPlan) -> None:
    """Steps 1 and 11 of seed 1, step 1 of seed 11, ...: all pairs differ, and a step's seed is always the same."""
    seeds = {
        (run, step): replace(plan, seed=run).step_plan(step).sampling.seed
        for run in (0, 1, 11)
        for step in range(1, 200)
    }
    assert len(set(seeds.values())) == len(seeds)
    assert plan.step_plan(5).sampling.seed == seeds[1, 5]


def test_nothing_but_the_seed_differs_between_steps(plan: RunPlan) -> None:
    step = plan.step_plan(7)
    assert replace(step, sampling=replace(step.sampling, seed=1)) == plan.step


def test_the_policy_waits_while_the_critic_warms_up(plan: RunPlan) -> None:
    warming = replace(plan, critic_warmup_steps=2)
    assert [warming.step_plan(step).updates_policy for step in (1, 2, 3)] == [False, False, True]


def test_message_names_samples_and_their_file() -> None:
    sequences = SequenceBatch(
        tokens=torch.zeros(4, 2, dtype=torch.int64),
        prompt_lengths=torch.ones(4, dtype=torch.int64),
        response_mask=torch.ones(4, 1, dtype=torch.bool),
        rollout_logprobs=torch.zeros(4, 1),
        rewards=torch.zeros(4),
        valid=torch.zeros(4, dtype=torch.bool),
        group_index=torch.zeros(4, dtype=torch.int64),
        sample_ids=("a/0", "a/1", "b/0", "b/1"),
    )
    train = TrainBatch(sequences=sequences, advantages=torch.zeros(4, 1), loss_mask=torch.zeros(4, 1, dtype=torch.bool))
    text = no_update_message(2, 9, train)
    assert text.startswith("2 steps in a row made no update (step 9 was the last)")
    assert "a/0, a/1, b/0, ... in samples/step_9.jsonl" in text
