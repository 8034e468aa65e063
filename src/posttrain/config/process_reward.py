"""A model that is trained during the run to reward the tokens of responses (PRIME, arXiv:2502.01456)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from posttrain.config.base import Section
from posttrain.config.policy import OptimizerConfig, ScheduleConfig

PROCESS_REWARD = "reward.process"  # its role, and the section of its settings
PROCESS_REFERENCE = "reward.process.reference"  # the role of the frozen model that it is compared with


class ProcessRewardConfig(Section):
    """A causal language model whose log-ratio to a frozen reference is trained to tell right responses from wrong ones, by their
    rewards from 0 to 1. A token's part of the log-ratio is its reward, which the advantage prime reads. Both models are on the
    policy's devices, and are trained and split by its engine."""

    path: str | None = None
    """Folder or hub id of the starting weights; null means the policy's."""
    reference_path: str | None = None
    """Folder or hub id of the frozen reference; null means the model's own starting weights."""
    update: Literal["before", "after", "never"] = "before"
    """Rewards are those of the model that has learned from the step (before: a further forward pass), of the passes in which it
    learns (after), or of a model that stays as it is (never)."""
    log_ratio_scale: float = Field(default=0.05, gt=0.0)
    """Reward per nat of the log-ratio, and logits per nat in the loss (the paper's beta)."""
    normalize: bool = True
    """Divide a step's rewards by the largest absolute sum of rewards from a token to the end of its response."""
    sequences_per_mini_batch: int | None = Field(default=None, ge=1)
    """Sequences per update; null means policy.sequences_per_mini_batch."""
    sequences_per_micro_batch: int = Field(default=8, ge=1)
    """Sequences per forward and backward pass of a device. Changes memory and speed, never the result."""
    optimizer: OptimizerConfig = OptimizerConfig(weight_decay=0.0, max_grad_norm=10.0)
    """Optimizer of the process reward model."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate of the process reward model over the run."""
    engine_options: dict[str, Any] = {}
    """Options of the training engine for the model and its reference, in its own words; they replace the policy's of the same
    name."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
