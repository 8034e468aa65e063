"""Numbers about a step, by metric name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from posttrain.records.batches import ShapedBatch, TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossStats:
    """The report of one forward and backward pass over a mini-batch. Sums, so that parts add up; ``tokens`` divides them."""

    loss: float  # the number whose gradient was taken
    sums: Mapping[str, float]  # metric name -> sum over loss tokens
    tokens: int  # loss tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValueStats(LossStats):
    """The report of a pass of a model with a head of one number."""

    values: Tensor  # [B, T] float32, detached, of the weights before the update


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardBackwardStats(LossStats):
    """The report of a pass of the policy."""

    policy_logprobs: Tensor  # [B, T] float32 nats, detached, of the weights before the update


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStats:
    grad_norm: float  # before clipping
    lr: float  # of this update
    skipped: bool  # the gradient was not finite, weights are unchanged
    loss_scale: float | None = None  # factor of the loss in float16; None: losses are not scaled


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UpdateStats:
    """One step's updates of one model, merged."""

    metrics: Mapping[str, float]
    # [n, T] float32 nats, of the first n rows, by the weights that the step started with; None: not computed
    trainer_logprobs: Tensor | None
    updates: int  # made
    skipped_updates: int  # not made, because loss or gradient was not finite or no token entered the loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """A step from its scored batch on."""

    shaped: ShapedBatch
    train: TrainBatch
    stats: UpdateStats
