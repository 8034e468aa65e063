"""Any sizes are planned consistently, or refused with one message that names a fix which then works."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from posttrain.config import RunConfig
from posttrain.plan.batch import plan_batches
from posttrain.records.batch_plans import BatchPlan

Sizes = dict[str, int | None]

sizes = st.fixed_dictionaries(
    {
        "data.prompts_per_step": st.integers(1, 40),
        "rollout.samples_per_prompt": st.integers(1, 16),
        "policy.sequences_per_mini_batch": st.none() | st.integers(1, 700),
        "policy.sequences_per_micro_batch_per_device": st.integers(1, 100),
        "policy.epochs_per_step": st.integers(1, 4),
        "placement.devices": st.integers(1, 9),
        "run.total_steps": st.none() | st.integers(1, 50),
        "run.total_epochs": st.integers(1, 5),
    }
)


def config_of(sizes: Sizes) -> RunConfig:
    values: dict[str, Any] = {"model": {"path": "x"}, "data": {"train_files": ["x"]}}
    for key, value in sizes.items():
        section, name = key.split(".")
        values.setdefault(section, {})[name] = value
    return RunConfig.model_validate(values)


def check(plan: BatchPlan, sizes: Sizes, training_prompts: int | None) -> None:
    """The plan is what a run that counts along would see."""
    sequences = list(range(plan.prompts_per_step * plan.samples_per_prompt))
    assert plan.sequences_per_step == len(sequences)
    per_pass = [
        sequences[i : i + plan.sequences_per_update] for i in range(0, len(sequences), plan.sequences_per_update)
    ]
    assert {len(mini) for mini in per_pass} == {plan.sequences_per_update}  # all are full
    assert plan.updates_per_step == plan.epochs_per_step * len(per_pass)
    per_pass_of_devices = plan.sequences_per_micro_batch_per_device * plan.devices
    rounds = len(range(0, plan.sequences_per_update, per_pass_of_devices))
    assert plan.gradient_accumulation_steps == rounds
    assert plan.sequences_per_micro_batch_per_device <= plan.sequences_per_update
    assert plan.sequences_per_micro_batch_per_device <= sizes["policy.sequences_per_micro_batch_per_device"]  # type: ignore[operator]
    assert plan.on_policy == (plan.updates_per_step == 1)
    if training_prompts is None:
        assert plan.steps_per_epoch is None
        assert plan.total_steps == sizes["run.total_steps"]
    else:
        assert plan.steps_per_epoch is not None and plan.steps_per_epoch >= 1
        assert 0 <= training_prompts - plan.steps_per_epoch * plan.prompts_per_step < plan.prompts_per_step
        assert plan.total_steps == (sizes["run.total_steps"] or sizes["run.total_epochs"] * plan.steps_per_epoch)  # type: ignore[operator]
    assert plan.total_updates == (None if plan.total_steps is None else plan.total_steps * plan.updates_per_step)


def fixes_in(text: str) -> list[Sizes]:
    """The changes that a fix offers: ``a=1 or a=2`` are two, ``a=1 with b=2`` is one."""
    return [
        {key: int(value) for key, value in re.findall(r"([a-z_]+\.[a-z_]+)=(\d+)", alternative)}
        for alternative in text.split(" or ")
        if "=" in alternative
    ]


@given(sizes=sizes, training_prompts=st.none() | st.integers(1, 60))
def test_planned_consistently_or_refused_with_a_fix_that_works(sizes: Sizes, training_prompts: int | None) -> None:
    plan, problems = plan_batches(config_of(sizes), training_prompts)
    if plan is not None:
        assert problems == []
        check(plan, sizes, training_prompts)
        return
    (problem,) = problems
    assert problem.field in sizes
    fixes = fixes_in(problem.fix)
    assert fixes or "add data" in problem.fix
    for fix in fixes:
        fixed = sizes | fix
        plan, problems = plan_batches(config_of(fixed), training_prompts)
        assert problems == [] and plan is not None, (problem, problems)
        check(plan, fixed, training_prompts)


@given(sizes=sizes)
def test_sizes_that_divide_are_never_refused(sizes: Sizes) -> None:
    sequences = sizes["data.prompts_per_step"] * sizes["rollout.samples_per_prompt"]  # type: ignore[operator]
    mini = sizes["policy.sequences_per_mini_batch"]
    plan, _ = plan_batches(config_of(sizes), None)
    copies = sizes["placement.devices"]
    assert (plan is not None) == (sequences % (mini or sequences) == 0 and (mini or sequences) % copies == 0)  # type: ignore[operator]
