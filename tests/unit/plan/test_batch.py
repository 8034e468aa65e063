"""Batch arithmetic by hand, and what a refusal says."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.config import RunConfig
from posttrain.config.sft import SftConfig
from posttrain.plan.batch import ends_with_epochs, plan_batches, samples_divide_by
from posttrain.plan.sft import plan_sft
from posttrain.records.batch_plans import BatchPlan


def config(**changes: Any) -> RunConfig:
    """8 prompts x 8 samples, micro-batches of 8, one device, unless changed: ``data__prompts_per_step=4``."""
    values: dict[str, Any] = {"model": {"path": "x"}, "data": {"train_files": ["x"]}}
    for name, value in changes.items():
        section, key = name.split("__")
        values.setdefault(section, {})[key] = value
    return RunConfig.model_validate(values)


def test_the_defaults_are_one_update_of_everything() -> None:
    plan, problems = plan_batches(config(), training_prompts=100)
    assert problems == [] and plan is not None
    assert plan.sequences_per_step == 64  # 8 x 8
    assert (plan.sequences_per_update, plan.updates_per_step) == (64, 1)
    assert plan.gradient_accumulation_steps == 8  # 64 / 8
    assert plan.steps_per_epoch == 12  # 100 / 8 = 12.5; the last 4 prompts wait for the next epoch's order
    assert (plan.total_steps, plan.total_updates) == (12, 12)
    assert plan.on_policy


def test_mini_batches_epochs_and_a_micro_batch_that_does_not_divide() -> None:
    plan, _ = plan_batches(
        config(
            policy__sequences_per_mini_batch=16,
            policy__epochs_per_step=3,
            policy__sequences_per_micro_batch_per_device=6,
            run__total_epochs=2,
        ),
        training_prompts=80,
    )
    assert plan is not None
    assert plan.updates_per_step == 12  # 3 x 64 / 16
    assert plan.gradient_accumulation_steps == 3  # 16 = 6 + 6 + 4
    assert plan.total_steps == 20  # 2 x 80 / 8
    assert plan.total_updates == 240
    assert not plan.on_policy


def test_a_micro_batch_larger_than_the_mini_batch_is_cut_to_it() -> None:
    plan, _ = plan_batches(
        config(policy__sequences_per_mini_batch=4, policy__sequences_per_micro_batch_per_device=32), None
    )
    assert plan is not None
    assert (plan.sequences_per_micro_batch_per_device, plan.gradient_accumulation_steps) == (4, 1)


def test_the_last_mini_batch_holds_what_is_left() -> None:
    """12 sequences in mini-batches of 5: 5, 5 and 2, in each of 2 passes."""
    sizes: dict[str, Any] = {
        "data__prompts_per_step": 6,
        "rollout__samples_per_prompt": 2,
        "policy__epochs_per_step": 2,
    }
    smaller: dict[str, Any] = {"policy__smaller_last_mini_batch": True}
    plan, problems = plan_batches(config(**sizes, **smaller, policy__sequences_per_mini_batch=5), None)
    assert problems == [] and plan is not None
    assert (plan.updates_per_step, plan.sequences_per_update, plan.sequences_per_step) == (6, 5, 12)
    assert plan_batches(config(**sizes, policy__sequences_per_mini_batch=5), None)[1]
    assert plan_batches(config(**sizes, **smaller, policy__sequences_per_mini_batch=13), None)[1]


def test_devices_may_share_unevenly() -> None:
    """64 sequences in mini-batches of 32 over 12 devices: 2 or 3 each, in micro-batches of up to 32 // 12 = 2."""
    sizes: dict[str, Any] = {"placement__devices": 12, "policy__sequences_per_mini_batch": 32}
    plan, problems = plan_batches(config(**sizes, policy__uneven_shares=True), None)
    assert problems == [] and plan is not None
    assert (plan.sequences_per_micro_batch_per_device, plan.gradient_accumulation_steps) == (
        2,
        2,
    )  # 32 / (2 x 12) = 1.3
    few = {"placement__devices": 48, "policy__uneven_shares": True}
    plan, problems = plan_batches(config(**sizes | few), None)
    assert problems == [] and plan is not None and plan.sequences_per_micro_batch_per_device == 1
    assert plan_batches(config(**sizes), None)[1]


def test_devices_share_a_mini_batch() -> None:
    plan, _ = plan_batches(config(placement__devices=4, policy__sequences_per_micro_batch_per_device=3), None)
    assert plan is not None
    assert plan.gradient_accumulation_steps == 6  # 64 / (4 x 3) = 5.33


def test_a_budget_of_tokens_leaves_the_number_of_micro_batches_open() -> None:
    plan, _ = plan_batches(config(policy__max_tokens_per_micro_batch=1000), None)
    assert plan is not None and plan.max_tokens_per_micro_batch == 1000
    assert (plan.sequences_per_micro_batch_per_device, plan.gradient_accumulation_steps) == (None, None)
    assert (plan.sequences_per_update, plan.updates_per_step) == (64, 1)
    by_count, _ = plan_batches(config(), None)
    assert by_count is not None and by_count.max_tokens_per_micro_batch is None


def test_a_mini_batch_may_split_a_group() -> None:
    plan, _ = plan_batches(config(rollout__samples_per_prompt=8, policy__sequences_per_mini_batch=4), None)
    assert plan is not None and plan.updates_per_step == 16


def test_steps_without_data() -> None:
    plan, _ = plan_batches(config(run__total_steps=7), None)
    assert plan is not None
    assert (plan.steps_per_epoch, plan.total_steps, plan.total_updates) == (None, 7, 7)
    plan, _ = plan_batches(config(), None)
    assert plan is not None
    assert (plan.total_steps, plan.total_updates) == (None, None)


def test_total_steps_beats_epochs() -> None:
    plan, _ = plan_batches(config(run__total_steps=7, run__total_epochs=3), 800)
    assert plan is not None and (plan.steps_per_epoch, plan.total_steps) == (100, 7)


def test_whichever_comes_first_ends_a_run() -> None:
    def planned(steps: int, rows: int | None) -> BatchPlan:
        plan, problems = plan_batches(
            config(
                run__total_steps=steps,
                run__total_epochs=3,
                run__within_epochs=True,
                data__prompts_per_step=8,
                advantage__name="gae",
            ),
            rows,
        )
        assert plan is not None and not problems
        return plan

    by_epochs = planned(50, 84)
    assert by_epochs.total_steps == 30  # 3 x (84 // 8)
    assert by_epochs.critic is not None and by_epochs.critic.total_updates == 30
    assert by_epochs.schedule_steps == 50  # the learning rate is that of the steps asked for, in verl
    assert by_epochs.schedule_updates == 50 * by_epochs.updates_per_step
    run = config(run__total_steps=50, run__total_epochs=3, run__within_epochs=True).run
    (note,) = ends_with_epochs(run, by_epochs.total_steps)
    assert note == (
        "the run ends after 30 steps: these are 3 passes over the training data (run.total_epochs), and run.total_steps=50 "
        "would be more"
    )
    assert planned(20, 84).total_steps == 20 and not ends_with_epochs(run, 50)
    assert planned(50, None).total_steps == 50  # the data was not counted


def test_epochs_of_fine_tuning_end_it_too() -> None:
    def planned(over: str, within: bool) -> tuple[int | None, int | None]:
        run = SftConfig.model_validate(
            {
                "model": {"path": "m"},
                "data": {"train_files": ["f"], "sequences_per_step": 8},
                "run": {"total_steps": 50, "total_epochs": 3, "within_epochs": within},
                "policy": {"schedule_over": over},
            }
        )
        plan, problems = plan_sft(run, 84)
        assert plan is not None and not problems
        return plan.total_steps, plan.schedule_updates

    assert planned("run", within=False) == (50, 50)
    assert planned("run", within=True) == (30, 50)
    assert planned("epochs", within=True) == planned("epochs", within=False) == (30, 30)


@pytest.mark.parametrize(
    ("changes", "prompts", "field", "text"),
    [
        (
            {"policy__sequences_per_mini_batch": 48},
            None,
            "policy.sequences_per_mini_batch",
            "8 prompts x 8 samples = 64 sequences do not split into mini-batches of 48 (64 / 48 = 1.333); "
            "use policy.sequences_per_mini_batch=64 or policy.sequences_per_mini_batch=32",
        ),
        (
            {"policy__sequences_per_mini_batch": 128},
            None,
            "policy.sequences_per_mini_batch",
            "8 prompts x 8 samples = 64 sequences in a step, which do not fill one mini-batch of 128; "
            "use policy.sequences_per_mini_batch=64, or fewer",
        ),
        (
            {},
            5,
            "data.prompts_per_step",
            "the training files hold 5 prompts, fewer than the 8 of one step (0 steps per epoch); "
            "use data.prompts_per_step=5, or add data",
        ),
        (  # 5 x 8 = 40 does not split into 32; 4 x 8 does
            {"policy__sequences_per_mini_batch": 32},
            5,
            "data.prompts_per_step",
            "the training files hold 5 prompts, fewer than the 8 of one step (0 steps per epoch); "
            "use data.prompts_per_step=4, or add data",
        ),
        (  # at most 3 x 8 = 24 sequences, never 64
            {"policy__sequences_per_mini_batch": 64},
            3,
            "data.prompts_per_step",
            "the training files hold 3 prompts, fewer than the 8 of one step (0 steps per epoch); "
            "use data.prompts_per_step=3 with policy.sequences_per_mini_batch=24, or add data",
        ),
        (
            {},
            0,
            "data.train_files",
            "the training files hold no prompts, and a step draws 8; name files with rows in them",
        ),
    ],
)
def test_refusals_show_the_arithmetic_and_a_fix(
    changes: dict[str, int], prompts: int | None, field: str, text: str
) -> None:
    plan, problems = plan_batches(config(**changes), prompts)
    assert plan is None
    assert [(str(problem), problem.field) for problem in problems] == [(text, field)]


# ------------------------------------------------------------------------------------------------------- the critic


def test_the_critic_cuts_a_step_in_its_own_way() -> None:
    plan, problems = plan_batches(
        config(
            advantage__name="gae",
            policy__sequences_per_mini_batch=32,
            policy__epochs_per_step=2,
            critic__sequences_per_mini_batch=16,
            critic__epochs_per_step=3,
            critic__sequences_per_micro_batch_per_device=6,
            critic__warmup_steps=4,
            run__total_steps=10,
        ),
        None,
    )
    assert problems == [] and plan is not None and plan.critic is not None
    assert plan.total_updates == 24  # (10 - 4) steps x 2 x 64 / 32: the policy waits for the critic
    assert plan.schedule_updates == 40  # 10 x 2 x 64 / 32: the learning rate is planned over all steps, and waits, too
    assert plan.critic.updates_per_step == 12  # 3 x 64 / 16
    assert plan.critic.total_updates == 120
    assert plan.critic.gradient_accumulation_steps == 3  # 16 = 6 + 6 + 4


def test_the_critic_does_as_the_policy_unless_told() -> None:
    changes = {"policy__sequences_per_mini_batch": 16, "policy__epochs_per_step": 2}
    plan, _ = plan_batches(config(advantage__name="gae", **changes), None)
    assert plan is not None and plan.critic is not None
    assert (plan.critic.sequences_per_update, plan.critic.epochs_per_step, plan.critic.updates_per_step) == (16, 2, 8)
    plan, _ = plan_batches(config(critic__sequences_per_mini_batch=48, critic__warmup_steps=9, **changes), None)
    assert plan is not None and plan.critic is None  # grpo asks for no values


def test_micro_batches_of_the_critic_by_tokens_are_not_counted() -> None:
    plan, _ = plan_batches(config(advantage__name="gae", critic__max_tokens_per_micro_batch=512), None)
    assert plan is not None and plan.critic is not None
    assert plan.critic.sequences_per_micro_batch_per_device is None
    assert plan.critic.gradient_accumulation_steps is None


def test_mini_batches_of_both_are_refused_together() -> None:
    sizes = {"policy__sequences_per_mini_batch": 48, "critic__sequences_per_mini_batch": 10}
    plan, problems = plan_batches(config(advantage__name="gae", **sizes), None)
    assert plan is None
    assert [problem.field for problem in problems] == [
        "policy.sequences_per_mini_batch",
        "critic.sequences_per_mini_batch",
    ]
    assert problems[1].fix == "use critic.sequences_per_mini_batch=16 or critic.sequences_per_mini_batch=8"


def test_a_run_that_is_all_warmup_is_refused() -> None:
    plan, (problem,) = plan_batches(config(advantage__name="gae", critic__warmup_steps=7, run__total_steps=7), None)
    assert plan is None
    assert str(problem) == (
        "the critic warms up for 7 steps, and the run has 7: the policy would never be updated; "
        "use critic.warmup_steps=6 or less, or a longer run"
    )


def test_epochs_whose_steps_no_run_could_make() -> None:
    plan, [problem] = plan_batches(config(run__total_epochs=1_000_000), training_prompts=100)
    # 100 // 8 = 12 steps per epoch; 10,000,000 // 12 = 833,333
    assert plan is None and problem.what == "1000000 epochs of 12 steps are 12000000 steps; a run has at most 10000000"
    assert problem.fix.startswith("use run.total_epochs=833333 or fewer")


@pytest.mark.parametrize(
    ("fit", "trained", "updates"), [("copy", 72, 3), ("drop", 48, 2), ("nearest", 48, 2), ("one", 24, 1)]
)
def test_a_step_that_does_not_divide_is_fitted(fit: str, trained: int, updates: int) -> None:
    """64 sequences in updates of 24: 64 = 2 x 24 + 16. On 3 devices, too, which 64 does not divide over."""
    step: dict[str, Any] = {
        "policy__sequences_per_mini_batch": 24,
        "policy__engine": "fsdp",
        "placement__devices": 3,
        "policy__sequences_per_micro_batch_per_device": 8,
    }
    assert plan_batches(config(**step), None)[0] is None
    plan, problems = plan_batches(config(**step, resampling__fit=fit), None)
    assert plan is not None and not problems
    assert (plan.sequences_per_step, plan.trained_samples_per_step, plan.updates_per_step) == (64, trained, updates)
    assert plan.gradient_accumulation_steps == 1


def test_a_multiple_that_holds_no_whole_updates_is_refused() -> None:
    step = {"policy__sequences_per_mini_batch": 24, "resampling__fit": "copy"}
    _, problems = plan_batches(config(**step, resampling__multiple_of=36), None)
    assert [str(each) for each in problems] == [
        "training samples are made to divide by 36, and an update of the policy has 24; "
        "use resampling.multiple_of=72, or null"
    ]
    both = config(**step, advantage__name="gae", critic__sequences_per_mini_batch=16)
    plan, problems = plan_batches(both, None)
    assert plan is not None and not problems and plan.critic is not None
    # lcm(24, 16) = 48: 64 are copied to 96
    assert (plan.trained_samples_per_step, plan.updates_per_step, plan.critic.updates_per_step) == (96, 4, 6)
    assert samples_divide_by(both, plan) == 48


def test_turns_are_counted_by_the_episodes() -> None:
    turns = {"environment__name": "guess_number", "environment__sample_per_turn": True}
    plan, problems = plan_batches(
        config(**turns, policy__sequences_per_mini_batch=24, resampling__fit="copy"), training_prompts=100
    )
    assert plan is not None and not problems
    assert (plan.counts_turns, plan.updates_per_step, plan.on_policy) == (True, 3, False)
