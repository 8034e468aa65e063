"""The batch arithmetic of a step: prompts become sequences, sequences mini-batches, mini-batches micro-batches."""

from __future__ import annotations

import math

from posttrain.config import RunConfig
from posttrain.config.critic import CriticConfig
from posttrain.config.fitting import fitted_count
from posttrain.config.policy import LearnerConfig
from posttrain.config.roles import needs_values
from posttrain.config.run import MOST_STEPS, RunSection
from posttrain.errors import Problem
from posttrain.records.batch_plans import BatchPlan, CriticBatchPlan


def plan_batches(config: RunConfig, training_prompts: int | None) -> tuple[BatchPlan | None, list[Problem]]:
    """Compute the batch sizes of a run, or the problems that prevent them.

    sequences_per_step = prompts_per_step * samples_per_prompt. A mini-batch (one update) must divide it; a mini-batch may
    split the samples of a prompt, whose advantages are known by then. Micro-batches need not divide anything: the last one
    is smaller, and losses divide by counts over the whole mini-batch. Cut by tokens, their number depends on the lengths of
    the responses, and is not known here. Where the advantage estimator needs values there is a
    critic, with mini-batches of its own. The copies of a model get equal shares, unless policy.uneven_shares.

    Args: ``training_prompts`` is the number of rows in the training files; None when they were not counted.
    Returns: the plan and no problem, or None and the problems, whose fixes make the sizes work.
    """
    prompts = config.data.prompts_per_step
    samples = config.rollout.samples_per_prompt
    sequences = prompts * samples
    mini = config.policy.sequences_per_mini_batch or sequences
    devices = config.placement.devices

    if training_prompts is not None and training_prompts < prompts:
        return None, [_too_few_prompts(config, training_prompts)]
    uses_critic = needs_values(config)
    critic_mini = config.critic.sequences_per_mini_batch or mini
    sizes = [("policy", mini, copies_of(config.policy, devices))]
    if uses_critic:
        sizes.append(("critic", critic_mini, copies_of(config.critic, devices)))
    uneven = config.policy.uneven_shares
    resampling = config.resampling
    multiple = resampling.multiple_of or math.lcm(*(size for _, size, _ in sizes))
    trained = fitted_count(sequences, multiple, resampling.fit)
    fits = resampling.fit != "none"
    problems = [] if uneven or fits else _step_over_copies(config, sizes, training_prompts)
    # How many there are, the episodes tell
    by_turns = config.environment.turn_is_response or (fits and config.environment.sample_per_turn)
    if not problems:
        for role, size, copies in sizes:
            given = getattr(config, role).sequences_per_mini_batch is not None
            if fits and multiple % size:
                problems += [_multiple_of_no_update(multiple, size, role)]
                continue
            splits = by_turns or not trained % size or _ends_smaller(config, size, sequences)
            if not splits or (size % copies and not uneven):
                problems += [_does_not_split(prompts, samples, size, copies, role)] if given or role == "policy" else []
    if problems:
        return None, problems

    preferring = config.group_filter.strategy == "prefer"
    drawn = prompts * (config.group_filter.oversample if preferring else 1)  # prompts of a step
    steps_per_epoch = training_prompts // drawn if training_prompts is not None else None
    if steps_per_epoch == 0:
        what = f"a step samples {prompts} x {drawn // prompts} = {drawn} prompts, and the training files hold {training_prompts}"
        fix = f"use group_filter.oversample={max(1, (training_prompts or 0) // prompts)}, or more prompts"
        return None, [Problem(what, fix=fix, field="group_filter.oversample")]
    total_steps, too_many = length_of(config.run, steps_per_epoch, within_epochs=config.run.within_epochs)
    if too_many:
        return None, too_many
    warmup = config.critic.warmup_steps if uses_critic else 0
    if total_steps is not None and 0 < total_steps <= warmup:
        return None, [_only_warmup(warmup, total_steps)]
    updates = config.policy.epochs_per_step * -(-trained // mini)
    max_tokens = config.policy.max_tokens_per_micro_batch
    copies = copies_of(config.policy, devices)
    micro = None
    if max_tokens is None:
        micro = min(config.policy.sequences_per_micro_batch_per_device, max(1, mini // copies))
    plan = BatchPlan(
        devices=devices,
        prompts_per_step=prompts,
        samples_per_prompt=samples,
        sequences_per_step=sequences,
        trained_samples_per_step=trained if fits else None,
        epochs_per_step=config.policy.epochs_per_step,
        updates_per_step=updates,
        sequences_per_update=mini,
        sequences_per_micro_batch_per_device=micro,
        gradient_accumulation_steps=-(-mini // (micro * copies)) if micro else None,
        max_tokens_per_micro_batch=max_tokens,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        schedule_steps=config.run.total_steps or total_steps,
        total_updates=(total_steps - warmup) * updates if total_steps is not None else None,
        critic=_critic_plan(config, trained, critic_mini, total_steps) if uses_critic else None,
        counts_turns=by_turns,
    )
    return plan, []


def samples_divide_by(config: RunConfig, batches: BatchPlan) -> int:
    """Return the number that resampling.fit makes training samples divide by."""
    updates = [batches.sequences_per_update, *([batches.critic.sequences_per_update] if batches.critic else [])]
    return config.resampling.multiple_of or math.lcm(*updates)


def process_sequences_per_update(config: RunConfig, batches: BatchPlan) -> int:
    """Sequences of an update of the process reward model, at most those of a step; the last update of a step may have fewer."""
    process = config.reward.process
    asked = process.sequences_per_mini_batch if process else None
    return min(asked or batches.sequences_per_update, batches.sequences_per_step)


def length_of(run: RunSection, steps_per_epoch: int | None, *, within_epochs: bool) -> tuple[int | None, list[Problem]]:
    """Compute the steps of a run: total_steps, or those of total_epochs where it is null.

    Args: ``steps_per_epoch`` is None where the data was not counted; ``within_epochs`` takes the fewer of the two.
    Returns: the steps, or None where they depend on the data, and the problem of a run that is too long.
    """
    counts = [] if run.total_steps is None else [run.total_steps]
    if steps_per_epoch is not None and (within_epochs or not counts):
        in_epochs = run.total_epochs * steps_per_epoch
        if not counts and in_epochs > MOST_STEPS:
            return None, [too_many_steps(run.total_epochs, steps_per_epoch)]
        counts.append(in_epochs)
    return min(counts, default=None), []


def ends_with_epochs(run: RunSection, total_steps: int | None) -> list[str]:
    """Return a note where a run of ``total_steps`` ends with its epochs, before the steps that run.total_steps asks for."""
    if run.total_steps is None or total_steps is None or total_steps >= run.total_steps:
        return []
    passes = "1 pass" if run.total_epochs == 1 else f"{run.total_epochs} passes"
    what = f"the run ends after {total_steps} steps: these are {passes} over the training data (run.total_epochs)"
    return [f"{what}, and run.total_steps={run.total_steps} would be more"]


def too_many_steps(epochs: int, steps_per_epoch: int) -> Problem:
    """Return the problem of a run whose epochs make more than MOST_STEPS steps."""
    field, fit = "run.total_epochs", MOST_STEPS // steps_per_epoch
    what = f"{epochs} epochs of {steps_per_epoch} steps are {epochs * steps_per_epoch} steps; a run has at most {MOST_STEPS}"
    return Problem(what, fix=f"use {field}={fit} or fewer, or run.total_steps", field=field)


def split_over(role: LearnerConfig | CriticConfig) -> int:
    """Devices that hold one copy of a trained model together."""
    return role.sequence_parallel * role.tensor_parallel * role.pipeline_parallel


def copies_of(role: LearnerConfig | CriticConfig, devices: int) -> int:
    """Data-parallel size: how many copies of the model share a mini-batch; at least 1."""
    return max(1, (devices if role.devices is None else len(role.devices)) // split_over(role))


def _step_over_copies(
    config: RunConfig, sizes: list[tuple[str, int, int]], training_prompts: int | None
) -> list[Problem]:
    """Refuses a step that cannot be shared out evenly among the copies of a model, whatever the mini-batches are."""
    prompts, samples = config.data.prompts_per_step, config.rollout.samples_per_prompt
    together = math.lcm(*(copies for _, _, copies in sizes))
    if prompts * samples % together == 0:
        return []
    role, _, copies = next(size for size in sizes if prompts * samples % size[2])
    what = f"{_product(prompts, samples)} in a step, which do not split over the {copies} copies of the {role}"
    stride = together // math.gcd(together, samples)  # prompts whose samples can be shared out
    counts = [count for count in (prompts // stride * stride, -(-prompts // stride) * stride) if count]
    field = "data.prompts_per_step"
    changes = []
    for count in counts:
        if training_prompts is None or count <= training_prompts:
            minis = [
                f"{name}.sequences_per_mini_batch={count * samples}"
                for name, _, each in sizes
                if (given := getattr(config, name).sequences_per_mini_batch)
                and (count * samples % given or given % each)
            ]
            changes.append(" with ".join([f"{field}={count}", *minis]))
    if not changes:
        return [Problem(what, fix="use placement.devices=1, or more data", field="placement.devices")]
    return [Problem(what, fix=f"use {' or '.join(changes)}", field=field)]


def _critic_plan(config: RunConfig, sequences: int, mini: int, total_steps: int | None) -> CriticBatchPlan:
    critic = config.critic
    epochs = critic.epochs_per_step or config.policy.epochs_per_step
    updates = epochs * -(-sequences // mini)
    # Then the number of micro-batches depends on the lengths.
    by_tokens = critic.max_tokens_per_micro_batch is not None
    copies = copies_of(critic, config.placement.devices)
    micro = None if by_tokens else min(critic.sequences_per_micro_batch_per_device, max(1, mini // copies))
    return CriticBatchPlan(
        epochs_per_step=epochs,
        updates_per_step=updates,
        sequences_per_update=mini,
        sequences_per_micro_batch_per_device=micro,
        gradient_accumulation_steps=-(-mini // (micro * copies)) if micro else None,
        warmup_steps=critic.warmup_steps,
        total_updates=total_steps * updates if total_steps is not None else None,
    )


def _only_warmup(warmup: int, total_steps: int) -> Problem:
    what = f"the critic warms up for {warmup} steps, and the run has {total_steps}: the policy would never be updated"
    field = "critic.warmup_steps"
    return Problem(what, fix=f"use {field}={total_steps - 1} or less, or a longer run", field=field)


def _ends_smaller(config: RunConfig, mini: int, sequences: int) -> bool:
    """Return True where the last mini-batch may hold less than the others."""
    return config.policy.smaller_last_mini_batch and mini < sequences


def _multiple_of_no_update(multiple: int, size: int, role: str) -> Problem:
    """About training samples that are made to divide by a number into which an update does not fit."""
    field = "resampling.multiple_of"
    what = f"training samples are made to divide by {multiple}, and an update of the {role} has {size}"
    return Problem(what, fix=f"use {field}={math.lcm(multiple, size)}, or null", field=field)


def _product(prompts: int, samples: int) -> str:
    return f"{prompts} prompts x {samples} samples = {prompts * samples} sequences"


def _does_not_split(prompts: int, samples: int, mini: int, copies: int, role: str) -> Problem:
    """About a mini-batch that does not divide the step's sequences, or that the copies cannot share. The step can be shared."""
    sequences = prompts * samples
    product = _product(prompts, samples)
    field = f"{role}.sequences_per_mini_batch"
    good = [size for size in range(copies, sequences + 1, copies) if sequences % size == 0]
    if mini > sequences:
        what = f"{product} in a step, which do not fill one mini-batch of {mini}"
        return Problem(what, fix=f"use {field}={sequences}, or fewer", field=field)
    if sequences % mini:
        what = f"{product} do not split into mini-batches of {mini} ({sequences} / {mini} = {sequences / mini:.4g})"
    else:
        what = f"mini-batches of {mini} sequences do not split over the {copies} copies of the {role}"
    above = [size for size in good if size >= mini][:1]
    below = [size for size in good if size < mini][-1:]
    return Problem(what, fix="use " + " or ".join(f"{field}={size}" for size in above + below), field=field)


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
    copies = copies_of(config.policy, config.placement.devices)
    splits = [count for count in range(training_prompts, 0, -1) if count * samples % copies == 0]
    keeps = [count for count in splits if mini is None or (count * samples % mini == 0 and mini % copies == 0)]
    if keeps:
        fix = f"use {field}={keeps[0]}, or add data"
    elif splits:
        fix = f"use {field}={splits[0]} with policy.sequences_per_mini_batch={splits[0] * samples}, or add data"
    else:
        fix = f"add data: {copies} copies of the policy need at least {copies // math.gcd(copies, samples)} prompts"
    return Problem(what, fix=fix, field=field)
