"""Sampling from the trainer's own weights."""

from posttrain.backends.rollout.native.engine import NativeEngine

__all__ = ["NativeEngine"]
