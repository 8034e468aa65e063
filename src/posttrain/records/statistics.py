"""Numbers about a step, by metric name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardStats:
    """What one forward/backward over a mini-batch reports. Sums, so that parts add up; ``tokens`` divides them."""

    loss: float  # the number whose gradient was taken
    sums: Mapping[str, float]  # metric name -> sum over loss tokens
    tokens: int  # loss tokens
    policy_logprobs: object  # [B, T] float32 tensor, detached, of the weights before the update


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStats:
    grad_norm: float  # before clipping
    lr: float  # of this update
    skipped: bool  # the gradient was not finite, weights are unchanged


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStats:
    """One step's updates, merged."""

    metrics: Mapping[str, float]
    policy_logprobs: object  # [B, T] float32, by the weights that the step started with
    skipped_updates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Everything logged about a step."""

    metrics: Mapping[str, float]
    usable: bool  # at least one update was made
    seconds: Mapping[str, float] = field(default_factory=dict)  # phase name -> s
