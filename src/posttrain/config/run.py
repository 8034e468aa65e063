"""The run itself: its name, folder, seed and length."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from posttrain.config.base import Section

# A run of so many steps lasts for months at a second each; more is a typing error, or stands for "never ends".
MOST_STEPS = 10_000_000


class RunSection(Section):
    name: str = Field(default="run", min_length=1)
    """Name of the run, shown in progress, reports and trackers."""
    folder: str | None = None
    """Folder that receives everything the run writes; null means runs/<name>."""
    seed: int = Field(default=1, ge=0, lt=2**32)
    """Seed of data order and sampling; the same seed gives the same metrics."""
    total_steps: int | None = Field(default=None, ge=1, le=MOST_STEPS)
    """Steps (turns of the loop) to run; null means total_epochs passes over the training data."""
    total_epochs: int = Field(default=1, ge=1, le=MOST_STEPS)
    """Passes over the training data, used when total_steps is null. Where a step draws further batches (group_filter.strategy
    refill and replace, in a synchronous run without data.domains and data.curriculum), the run ends with the step that completes
    them, before the planned steps."""
    within_epochs: bool = False
    """End after total_epochs passes where these are fewer steps than total_steps; learning rates are still those of
    total_steps."""
    resume: Literal["auto", "never"] = "auto"
    """auto: go on from the newest checkpoint in the run folder; never: refuse folders that hold a run or checkpoints."""
    resume_path: str | None = None
    """A global_step_N folder, or a run folder (its newest checkpoint), to resume from; null means the run's own folder.
    Started again, the run resumes from its own later checkpoints."""
    hub_commits: dict[str, str] = {}
    """Commits of the hub's models (org/name) and data sets (datasets/org/name) that the run reads. A start fills in what is
    missing: a resumed run's own, otherwise the newest of each revision."""
    max_skipped_steps: int = Field(default=3, ge=1)
    """Consecutive steps without a usable update (nothing finite, or no valid reward) after which the run stops itself."""
    grace_s: float = Field(default=60.0, gt=0.0)
    """Seconds a run has to stop after a signal: what does not end in time is left and done again when the run is resumed."""
