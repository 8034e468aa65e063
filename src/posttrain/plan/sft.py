"""The arithmetic of a run of supervised fine-tuning: rows become steps, steps are cut into micro-batches."""

from __future__ import annotations

from posttrain.config.sft import SftConfig
from posttrain.errors import Problem
from posttrain.plan.batch import copies_of, length_of
from posttrain.records.batch_plans import SftBatchPlan


def plan_sft(config: SftConfig, rows: int | None) -> tuple[SftBatchPlan | None, list[Problem]]:
    """Compute the batch sizes of fine-tuning, or the problems that prevent them.

    A step takes data.sequences_per_step rows, what is left at the end of an epoch is left out of it, and micro-batches need not
    divide anything. The devices are those of a placement that can be (plan.roles.place).

    Args: ``rows`` of the training files; None when they were not counted.
    Returns: the plan and no problem, or None and the problems.
    """
    sequences, devices = config.data.sequences_per_step, config.placement.devices
    copies = copies_of(config.policy, devices)
    if sequences % copies:
        return None, [_does_not_split(sequences, copies)]
    if rows is not None and rows < sequences:
        return None, [_too_few_rows(sequences, rows)]
    steps_per_epoch = rows // sequences if rows is not None else None
    run, whole = config.run, config.policy.schedule_over == "epochs"
    in_epochs = run.total_epochs * steps_per_epoch if steps_per_epoch is not None else None
    total_steps, too_many = length_of(run, steps_per_epoch, within_epochs=whole or run.within_epochs)
    if too_many:
        return None, too_many
    max_tokens = config.policy.max_tokens_per_micro_batch
    micro = min(config.policy.sequences_per_micro_batch_per_device, sequences // copies) if max_tokens is None else None
    return SftBatchPlan(
        devices=devices,
        sequences_per_step=sequences,
        sequences_per_micro_batch_per_device=micro,
        gradient_accumulation_steps=-(-sequences // (micro * copies)) if micro else None,
        max_tokens_per_micro_batch=max_tokens,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        schedule_updates=in_epochs if whole else run.total_steps or total_steps,
    ), []


def _does_not_split(sequences: int, copies: int) -> Problem:
    field = "data.sequences_per_step"
    fits = [count for count in (sequences // copies * copies, -(-sequences // copies) * copies) if count]
    what = f"{sequences} sequences in a step do not split over the {copies} copies of the policy"
    return Problem(what, fix=f"use {' or '.join(f'{field}={count}' for count in fits)}", field=field)


def _too_few_rows(sequences: int, rows: int) -> Problem:
    if rows == 0:
        what = f"the training files hold no rows, and a step takes {sequences}"
        return Problem(what, fix="name files with rows in them", field="data.train_files")
    what = f"the training files hold {rows} rows, fewer than the {sequences} of one step (0 steps per epoch)"
    field = "data.sequences_per_step"
    return Problem(what, fix=f"use {field}={rows} or fewer, or add data", field=field)
