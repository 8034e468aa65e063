"""From rewards to the loss: advantages, KL, clipping."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from posttrain.config.base import Section


class AdvantageConfig(Section):
    name: str = "grpo"
    """Advantage estimator."""
    normalize_by_std: bool = True
    """grpo: divide by the group's standard deviation (GRPO); false only subtracts the mean (Dr. GRPO)."""


class LossConfig(Section):
    name: str = "ppo_clip"
    """Policy loss."""
    clip_ratio_low: float = Field(default=0.2, ge=0.0, lt=1.0)
    """The ratio is clipped below at 1 - this."""
    clip_ratio_high: float = Field(default=0.2, ge=0.0)
    """The ratio is clipped above at 1 + this."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """Bounds the loss of tokens with negative advantage at this ratio; null does not."""
    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"] = "token_mean"
    """How token losses become one number, over the whole mini-batch."""
    entropy_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the entropy bonus."""
    kl_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the KL to the reference in the loss; 0 loads no reference model."""
    kl_estimator: Literal["k1", "abs", "k2", "k3"] = "k3"
    """Estimator of that KL."""
