"""The critic: the model that estimates what a response is still worth, token by token (PPO)."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from posttrain.config.algorithm import Aggregation
from posttrain.config.base import Section
from posttrain.config.lora import LoraConfig
from posttrain.config.model import ModelName
from posttrain.config.policy import ONE_DEVICE, OptimizerConfig, ScheduleConfig


class CriticConfig(Section):
    """Used by estimators that need values (gae)."""

    path: ModelName | None = None
    """Folder or hub id of the starting weights: a causal language model, which gets a new value head, or a token
    classification model with one label; null means the policy's."""
    engine: str = ONE_DEVICE
    """Training engine, as policy.engine."""
    config_overrides: dict[str, Any] = {}
    """Fields of the critic's config.json that are set to other values before its weights are loaded."""
    freeze_vision: bool = False
    """Leave a vision-language critic's vision tower, and the layers that join it to the language model, as they are."""
    freeze: list[str] = []
    """Beginnings of the names of the critic's weights that stay as they are. Its value head is always trained."""
    epochs_per_step: int | None = Field(default=None, ge=1)
    """Passes over a step's sequences; null means policy.epochs_per_step."""
    sequences_per_mini_batch: int | None = Field(default=None, ge=1)
    """Sequences per update; null means policy.sequences_per_mini_batch."""
    shuffle: bool | None = None
    """Draw mini-batches at random; null means policy.shuffle."""
    shuffle_seed: int | None = Field(default=None, ge=0)
    """Seed of these draws; null means policy.shuffle_seed."""
    sequences_per_micro_batch_per_device: int = Field(default=8, ge=1)
    """Sequences per forward and backward pass. Changes memory and speed, never the result."""
    max_tokens_per_micro_batch: int | None = Field(default=None, ge=1)
    """Cut micro-batches by this many tokens per device instead of by count; null cuts by count."""
    lora: LoraConfig | None = None
    """Train a low-rank adapter and the value head instead of all weights; null trains all of them."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    """Optimizer of the critic."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate of the critic over the run."""
    value_clip: float | None = Field(default=0.5, gt=0.0)
    """Values move at most this far from the step's old ones before the loss stops rewarding it; null does not clip."""
    aggregation: Aggregation = "token_mean"
    """Aggregation of the token losses over the whole mini-batch."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps at the start in which only the critic is updated."""
    gradient_checkpointing: bool = False
    """Recompute activations in the critic's backward pass."""
    activation_offload: bool = False
    """Keep the critic's activations in CPU memory between forward and backward pass; for accelerators."""
    engine_options: dict[str, Any] = {}
    """Options for the training engine, as policy.engine_options."""
    devices: list[int] | None = None
    """Devices of the critic, by number; null means all."""
    sequence_parallel: int = Field(default=1, ge=1)
    """Devices that share one sequence."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Devices that share one layer's matrices."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Devices that share the layers."""
