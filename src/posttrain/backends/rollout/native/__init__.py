"""Sampling from the trainer's own weights, without a copy of them."""

from posttrain.backends.rollout.native.engine import NativeEngine

__all__ = ["NativeEngine"]
