"""The arithmetic of a tuning run: rows become sequences, sequences steps, and steps are cut into micro-batches."""

from __future__ import annotations

from dataclasses import replace

from posttrain.config.tune import TuneConfig
from posttrain.errors import Problem
from posttrain.plan.batch import copies_of
from posttrain.plan.sft import plan_sft
from posttrain.records.batch_plans import SftBatchPlan


def plan_tune(config: TuneConfig, rows: int | None) -> tuple[SftBatchPlan | None, list[Problem]]:
    """Compute the batch sizes of tuning, or the problems that prevent them: those of plan.sft, in sequences; a pair is two, which
    no micro-batch divides.

    Args: ``rows`` of the training files, as the method reads them; None when they were not counted.
    Returns: the plan and no problem, or None and the problems.
    """
    if not config.method.paired:
        return plan_sft(config, rows)
    sequences, field = config.data.sequences_per_step, "data.sequences_per_step"
    if sequences % 2:
        what = f"{sequences} sequences are no whole number of pairs, which are two sequences each"
        fits = " or ".join(f"{field}={count}" for count in (sequences - 1, sequences + 1) if count)
        return None, [Problem(what, fix=f"use {fits}", field=field)]
    if rows is not None and rows < sequences // 2:
        what = (
            f"the training files hold {rows} pairs, fewer than the {sequences // 2} of one step ({sequences} sequences)"
        )
        fix = f"use {field}={rows * 2} or fewer, or add data" if rows else "name files with rows in them"
        return None, [Problem(what, fix=fix, field=field if rows else "data.train_files")]
    plan, problems = plan_sft(config, None if rows is None else 2 * rows)
    if plan is None or plan.sequences_per_micro_batch_per_device is None:
        return plan, problems
    micro = whole_pairs(plan.sequences_per_micro_batch_per_device)
    passes = -(-sequences // (micro * copies_of(config.policy, plan.devices)))
    return replace(plan, sequences_per_micro_batch_per_device=micro, gradient_accumulation_steps=passes), problems


def whole_pairs(sequences: int) -> int:
    """Return the sequences of a micro-batch of whole pairs: at least one pair."""
    return max(sequences // 2, 1) * 2
