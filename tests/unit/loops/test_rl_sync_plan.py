"""The plan of every step, and the message of a run that gives up."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from posttrain.loops.rl_plan import RunPlan
from posttrain.loops.rl_sync import no_update_message, watched_of
from posttrain.loops.training import LoopPlan
from posttrain.records.plans import AdvantagePlan, DistillationPlan, LossPlan, StepPlan, UpdatePlan
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
        loop=LoopPlan(total_steps=3, max_skipped_steps=3),
        validation_sampling=SAMPLING,
        validation_prompts=[],
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


def test_nothing_but_the_seed_and_the_number_differs_between_steps(plan: RunPlan) -> None:
    step = plan.step_plan(7)
    assert replace(step, sampling=replace(step.sampling, seed=1, step=0)) == plan.step and step.sampling.step == 7


def test_drawn_mini_batches_differ_from_step_to_step(plan: RunPlan) -> None:
    drawn = replace(plan, step=replace(plan.step, update=replace(plan.step.update, shuffle_seed=3)))
    seeds = [drawn.step_plan(step).update.shuffle_seed for step in (1, 2, 1)]
    assert seeds[0] == seeds[2] != seeds[1] and plan.step_plan(1).update.shuffle_seed is None


def test_the_policy_waits_while_the_critic_warms_up(plan: RunPlan) -> None:
    warming = replace(plan, critic_warmup_steps=2)
    assert [warming.step_plan(step).updates_policy for step in (1, 2, 3)] == [False, False, True]


def test_the_reference_moves_after_steps_or_epochs(plan: RunPlan) -> None:
    def moves(every: int | Literal["epoch"] | None, steps_per_epoch: int) -> list[int]:
        chosen = replace(plan, reference_every=every)
        epochs = [step / steps_per_epoch for step in range(8)]
        return [step for step in range(1, 8) if chosen.reference_moves(step, epochs[step - 1], epochs[step])]

    assert moves(None, 3) == []
    assert moves(3, 5) == [3, 6]
    assert moves("epoch", 3) == [3, 6]
    # a step that draws two and a half batches of a short epoch
    assert replace(plan, reference_every="epoch").reference_moves(4, 1.9, 2.4)


def test_message_names_samples_and_their_file() -> None:
    text = no_update_message(9, ("a/0", "a/1", "b/0", "b/1"))
    assert "a/0, a/1, b/0, ... in samples/step_9.jsonl" in text


def test_teachers_alone_need_no_signal_in_the_rewards(plan: RunPlan) -> None:
    """One response to a prompt, whose reward is only measured, is no group without a signal."""

    def watched(distillation: DistillationPlan | None) -> set[str]:
        return {each.metric for each in watched_of(replace(plan, step=replace(plan.step, distillation=distillation)))}

    teachers = DistillationPlan(name="reverse_kl", of_sampled_tokens=False, teachers={"one": 1.0}, as_loss=True)
    assert watched(None) - watched(replace(teachers, alone=True)) == {"group/no_signal_share"}
    assert watched(teachers) == watched(None)
