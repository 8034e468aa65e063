"""Responses to the prompts of a file, part by part."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from posttrain.errors import RunInterrupted, RunStopped
from posttrain.interfaces.rollout_engine import RolloutEngine
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory
from posttrain.run.parts import Parts
from posttrain.run.stopping import StepAbandoned, StopSignal

MAX_FAILED_PARTS = 3  # in a row: whatever answers has gone

OnWork = Callable[[int, int], None]  # rows and tokens that were done since the last call


def run(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    parts: Parts,
    *,
    stop: StopSignal,
    on_work: OnWork,
) -> None:
    """Sample every part that is not done yet, and keep each as soon as it is.

    A part is always sampled as a whole, with the same neighbours: what a row gets does not depend on where a run was broken
    off, down to the last bit.

    Raises: RunInterrupted when a signal asks to stop; the part under way is left, and sampled again when started again.
        RunStopped at the end, or after MAX_FAILED_PARTS parts in a row, when a server left responses out: their parts are
        not kept, because a response that is not there is no empty text.
    """
    failed: list[Trajectory] = []
    in_a_row = 0
    for part in parts.missing():
        rows = parts.rows_of(part)

        def on_tokens(tokens: int) -> None:
            stop.check()
            on_work(0, tokens)

        try:
            stop.check()
            groups = engine.generate([prompts[row] for row in rows], sampling, on_tokens)
        except StepAbandoned:
            done = len(prompts) - sum(len(parts.rows_of(each)) for each in parts.missing())
            raise RunInterrupted(
                f"stopped by {stop.name}; {done} of {len(prompts)} rows are done and kept in {parts.folder}; start it again to "
                "resume"
            ) from None
        lost = [one for group in groups for one in group.trajectories if one.stop_reason is StopReason.FAILED]
        failed += lost
        in_a_row = in_a_row + 1 if lost else 0
        if in_a_row == MAX_FAILED_PARTS:
            break
        if not lost:
            parts.write(part, [[trajectory.text for trajectory in group.trajectories] for group in groups])
            on_work(len(rows), 0)
    if failed:
        left = sum(len(parts.rows_of(each)) for each in parts.missing())
        raise RunStopped(
            f"{len(failed)} responses failed, the first of them {failed[0].sample_id}: {failed[0].failure}. "
            f"{len(prompts) - left} of {len(prompts)} rows are done and kept in {parts.folder}; start it again to sample the rest"
        )
