"""Settings of metrics, samples and trackers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from posttrain.config.base import Section

# Trackers whose pages others read later, so that they get a dialect's names and tables.
SERVICES = ("tensorboard", "wandb", "mlflow", "swanlab")


class TrackingConfig(Section):
    trackers: list[str] = ["console"]
    """Trackers besides metrics.jsonl, which is always written: console, tensorboard, wandb, mlflow, swanlab."""
    project: str = "posttrain"
    """Project under which trackers file the run."""
    offline: bool = False
    """wandb, swanlab: write to the run folder and send nothing; `wandb sync` and `swanlab sync` send it later."""
    proxy: str | None = None
    """wandb: address of a proxy for what it sends; null goes by the environment."""
    validation_samples: int = Field(default=0, ge=0)
    """Responses of every validation that are sent to the trackers as a table: those to the first prompts; 0 sends none."""
    dialect_names: Literal["verl", "skyrl", "roll"] | None = None
    """Send metrics to the trackers under the names of this dialect too (docs/tracking.md); null sends ours alone."""
    samples_every_steps: int | None = Field(default=1, ge=1)
    """Write samples/step_N.jsonl every so many steps; null never."""
    batches_every_steps: int | None = Field(default=None, ge=1)
    """Write batches/step_N.safetensors every so many steps: the exact tokens, log-probs and rewards of the step and what was
    made of them, from which posttrain replay makes the update again; null never."""
