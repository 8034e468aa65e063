"""Responses to the prompts of a file, part by part."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from posttrain.errors import RunInterrupted
from posttrain.interfaces.rollout_engine import RolloutEngine
from posttrain.loops.stopping import StepAbandoned, StopSignal
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams
from posttrain.stages.parts import Parts

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
    """
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
                "go on"
            ) from None
        parts.write(part, [[trajectory.text for trajectory in group.trajectories] for group in groups])
        on_work(len(rows), 0)
