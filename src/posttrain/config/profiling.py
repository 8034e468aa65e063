"""Profiles of chosen phases of chosen steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from posttrain.config.base import Section

PhaseName = Literal[
    "rollout",
    "reward",
    "baseline",
    "logprobs",
    "values",
    "critic_update",
    "update",
    "weight_sync",
    "validation",
    "validation_loss",
]


class ProfilingConfig(Section):
    steps: list[Annotated[int, Field(ge=0)]] | Literal["all"] = []
    """Steps that are profiled (0 is the validation of the starting weights), or all; none by default."""
    phases: list[PhaseName] = []
    """Phases of those steps that are profiled, by the names of the metrics time/<phase>_s; empty means every phase."""
    ranks: list[Annotated[int, Field(ge=0)]] | Literal["all"] = [0]
    """Ranks of the workers of each role to profile, or all, in a run with several processes; besides the leading process."""
    operators: bool = True
    """Record every operator: a Chrome trace for each phase, for ui.perfetto.dev or chrome://tracing."""
    shapes: bool = False
    """Record the shapes of the operators' inputs, too."""
    stacks: bool = False
    """Record the lines of Python that called them, too; slow, and the files are large."""
    memory: bool = False
    """A snapshot of the memory of a CUDA device for each phase, for docs.pytorch.org/memory_viz."""
    folder: str | None = None
    """Folder of the profiles; null means profiles in the run folder."""
