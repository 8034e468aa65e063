"""Settings of checkpoints: contents, times, and which ones are kept."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from posttrain.config.base import Section


class CheckpointConfig(Section):
    folder: str | None = None
    """Folder of the checkpoints of this run alone; null means checkpoints in the run folder."""
    every_steps: int | None = Field(default=None, ge=1)
    """Save after every so many steps; null means only at the end."""
    at_end: bool = True
    """Save after the last step."""
    before_expiry_s: float | None = Field(default=60.0, ge=0.0)
    """Save after a step also when the machine ends within the time of the longest step so far plus this. Its end, in Unix
    seconds, is read from the environment: MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP or, on SageMaker,
    SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP; null reads neither."""
    keep_last: int | None = Field(default=None, ge=1)
    """Keep only the newest so many checkpoints; null keeps all."""
    keep_best: int | None = Field(default=None, ge=1)
    """Additional checkpoints to keep, those with the best values of best_metric; null keeps none for that."""
    best_metric: str | None = None
    """Name of a metric in metrics.jsonl, such as reward/mean or validation/TASK/accuracy; needed by keep_best."""
    best_mode: Literal["max", "min"] = "max"
    """Direction of best_metric: max keeps high values, min low ones."""
    keep_every: int | None = Field(default=None, ge=1)
    """Additional checkpoints to keep, those of steps that this divides; null keeps none for that."""
    background: bool = True
    """Write checkpoints while the next step samples; its first update waits until that is done. False waits at once."""
    save_optimizer: bool = True
    """Save the optimizer's averages. Without them a checkpoint is a third as large, and a run that goes on is not exact."""
    sharded: bool = False
    """Every process writes its own part of weights and averages, instead of the first one writing all of them gathered. Any
    number of processes resumes from that, with any engine; posttrain export converts it to a plain folder."""
    load_optimizer: bool = True
    """Load the optimizer's averages of the checkpoint on resume; false starts them from zero."""
    load_schedule: bool = True
    """Load the number of updates of the checkpoint on resume; false restarts the learning-rate schedule."""
    export_every_steps: int | None = Field(default=None, ge=1)
    """Write plain Hugging Face folders after every so many steps and at the end; null writes none. All stay."""
    export_folder: str | None = None
    """Folder of those; null means exports in the run folder."""
    upload: str | None = None
    """URL (s3://...) or folder that every checkpoint is copied to in the background; null copies none."""
    upload_keep_last: int | None = Field(default=None, ge=1)
    """Keep only the newest so many checkpoints there; null means as many as keep_last. keep_best and keep_every hold, too."""
    upload_wait_s: float = Field(default=600.0, ge=0.0)
    """Seconds that a run waits at its end for uploads; after a signal it waits no longer than run.grace_s."""
    callback: str | None = None
    """Class of your own, package.module:Class or path/to/file.py:Class, whose on_save is called after every checkpoint, in a
    process of its own (docs/own-classes.md); null calls none."""
    callback_options: dict[str, Any] = {}
    """Settings that it is constructed with, as its config."""
    callback_timeout_s: float = Field(default=600.0, gt=0.0, le=1e7)
    """Time that one call of on_save may take."""
    callback_environment_variables: list[str] = []
    """Names of further environment variables that its process may see, such as AWS_SECRET_ACCESS_KEY."""
