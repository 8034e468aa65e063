"""The rows of a file, sampled part by part and kept as they are done."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.errors import RunInterrupted, RunStopped
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Trajectory
from posttrain.run.parts import Parts
from posttrain.run.stopping import StepAbandoned, StopSignal

MAX_FAILED_PARTS = 3  # in a row: whatever answers has gone

OnWork = Callable[[int, int], None]  # rows and tokens that were done since the last call
OnTokens = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Sampled:
    """One part."""

    texts: list[list[Any]]  # of every row, as Parts writes them
    lost: list[Trajectory]  # that the sampler failed: the part is not kept


def run_parts(
    parts: Parts,
    prompts: Sequence[Prompt],
    sample: Callable[[list[Prompt], OnTokens], Sampled],
    *,
    stop: StopSignal,
    on_work: OnWork,
    failure: str,
    again: str,
    only: Collection[int] | None = None,
) -> None:
    """Sample every part that is not done yet, and keep each as soon as it is.

    Args: failure, what the stop is about ("responses failed"), behind their number; again, what a further start does;
        only, the parts to sample; None: all.
    Raises: RunInterrupted when a signal asks to stop; the part under way is left, and sampled again when started again.
        RunStopped at the end, or after MAX_FAILED_PARTS parts in a row, when the sampler failed in some of them.
    """
    lost: list[Trajectory] = []
    in_a_row = 0
    for part in parts.missing():
        if only is not None and part not in only:
            continue
        rows = parts.rows_of(part)

        def on_tokens(tokens: int) -> None:
            stop.check()
            on_work(0, tokens)

        try:
            stop.check()
            sampled = sample([prompts[row] for row in rows], on_tokens)
        except StepAbandoned:
            raise RunInterrupted(f"stopped by {stop.name}; {_done(parts, prompts)}; start it again to resume") from None
        lost += sampled.lost
        in_a_row = in_a_row + 1 if sampled.lost else 0
        if in_a_row == MAX_FAILED_PARTS:
            break
        if not sampled.lost:
            parts.write(part, sampled.texts)
            on_work(len(rows), 0)
    if lost:
        first = f"the first of them {lost[0].sample_id}: {lost[0].failure}"
        raise RunStopped(f"{len(lost)} {failure}, {first}. {_done(parts, prompts)}; start it again to {again} the rest")


def _done(parts: Parts, prompts: Sequence[Prompt]) -> str:
    left = sum(len(parts.rows_of(each)) for each in parts.missing())
    return f"{len(prompts) - left} of {len(prompts)} rows are done and kept in {parts.folder}"
