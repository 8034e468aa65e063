"""The batch arithmetic of a step: prompts become sequences, sequences mini-batches, mini-batches micro-batches."""

from __future__ import annotations

from posttrain.config import RunConfig
from posttrain.errors import Problem
from posttrain.records.plans import BatchPlan


def plan_batches(config: RunConfig, training_prompts: int | None) -> tuple[BatchPlan | None, list[Problem]]:
    """How many of what, or why that cannot be.

    sequences_per_step = prompts_per_step * samples_per_prompt. A mini-batch (one update) must divide it; a mini-batch may
    split the samples of a prompt, whose advantages are known by then. Micro-batches need not divide anything: the last one
    is smaller, and losses divide by counts over the whole mini-batch.

    Args: ``training_prompts`` is the number of rows in the training files; None when nobody looked.
    Returns: the plan and no problem, or None and one problem whose fix makes the sizes work.
    """
    prompts = config.data.prompts_per_step
    samples = config.rollout.samples_per_prompt
    sequences = prompts * samples
    mini = config.policy.sequences_per_mini_batch or sequences
    devices = config.placement.devices

    if training_prompts is not None and training_prompts < prompts:
        return None, [_too_few_prompts(config, training_prompts)]
    if sequences % mini:
        return None, [_does_not_split(prompts, samples, mini)]

    steps_per_epoch = training_prompts // prompts if training_prompts is not None else None
    total_steps = config.run.total_steps
    if total_steps is None and steps_per_epoch is not None:
        total_steps = config.run.total_epochs * steps_per_epoch
    updates = config.policy.epochs_per_step * (sequences // mini)
    micro = min(config.policy.sequences_per_micro_batch_per_device, mini)
    plan = BatchPlan(
        devices=devices,
        prompts_per_step=prompts,
        samples_per_prompt=samples,
        sequences_per_step=sequences,
        epochs_per_step=config.policy.epochs_per_step,
        updates_per_step=updates,
        sequences_per_update=mini,
        sequences_per_micro_batch_per_device=micro,
        gradient_accumulation_steps=-(-mini // (micro * devices)),
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        total_updates=total_steps * updates if total_steps is not None else None,
    )
    return plan, []


def _does_not_split(prompts: int, samples: int, mini: int) -> Problem:
    sequences = prompts * samples
    product = f"{prompts} prompts x {samples} samples = {sequences} sequences"
    field = "policy.sequences_per_mini_batch"
    if mini > sequences:
        what = f"{product} in a step, which do not fill one mini-batch of {mini}"
        return Problem(what, fix=f"use {field}={sequences}, or fewer", field=field)
    below, above = divisors_around(sequences, mini)
    what = f"{product} do not split into mini-batches of {mini} ({sequences} / {mini} = {sequences / mini:.4g})"
    return Problem(what, fix=f"use {field}={above} or {field}={below}", field=field)


def _too_few_prompts(config: RunConfig, training_prompts: int) -> Problem:
    """The fix keeps the mini-batch where a smaller step allows it."""
    prompts, samples = config.data.prompts_per_step, config.rollout.samples_per_prompt
    mini = config.policy.sequences_per_mini_batch
    field = "data.prompts_per_step"
    if training_prompts == 0:
        what = f"the training files hold no prompts, and a step draws {prompts}"
        return Problem(what, fix="name files with rows in them", field="data.train_files")
    what = (
        f"the training files hold {training_prompts} prompts, fewer than the {prompts} of one step (0 steps per epoch)"
    )
    fits = [count for count in range(training_prompts, 0, -1) if mini is None or count * samples % mini == 0]
    if fits:
        return Problem(what, fix=f"use {field}={fits[0]}, or add data", field=field)
    fix = (
        f"use {field}={training_prompts} with policy.sequences_per_mini_batch={training_prompts * samples}, or add data"
    )
    return Problem(what, fix=fix, field=field)


def divisors_around(number: int, near: int) -> tuple[int, int]:
    """The largest divisor of ``number`` that is at most ``near``, and the smallest that is at least it (near <= number)."""
    below = next(candidate for candidate in range(near, 0, -1) if number % candidate == 0)
    above = next(candidate for candidate in range(near, number + 1) if number % candidate == 0)
    return below, above
