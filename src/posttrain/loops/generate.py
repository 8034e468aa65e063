"""Responses to the prompts of a file, part by part."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from posttrain.interfaces.rollout_engine import RolloutEngine
from posttrain.loops.by_parts import OnTokens, OnWork, Sampled, run_parts
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, StopReason
from posttrain.run.parts import Parts
from posttrain.run.stopping import StopSignal


def run(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    parts: Parts,
    *,
    stop: StopSignal,
    on_work: OnWork,
    only: Collection[int] | None = None,
) -> None:
    """Sample every part that is not done yet, or the ``only`` ones of them, and keep each as soon as it is.

    A part is always sampled as a whole, with the same neighbours: what a row gets does not depend on where a run was broken
    off, down to the last bit. A part in which a server left responses out is not kept, because a response that is not there is
    no empty text.

    Raises: RunInterrupted, RunStopped (by_parts.run_parts).
    """

    def sample(rows: list[Prompt], on_tokens: OnTokens) -> Sampled:
        groups = engine.generate(rows, sampling, on_tokens)
        lost = [one for group in groups for one in group.trajectories if one.stop_reason is StopReason.FAILED]
        return Sampled([[one.text for one in group.trajectories] for group in groups], lost)

    run_parts(parts, prompts, sample, stop=stop, on_work=on_work, failure="responses failed", again="sample", only=only)
