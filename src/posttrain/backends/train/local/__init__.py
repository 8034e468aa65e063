"""Training engine for one device, in this process."""

from __future__ import annotations

from posttrain.backends.torch_training.critic import ValueModel
from posttrain.backends.torch_training.policy import PolicyModel
from posttrain.registry import TRAIN_ENGINES, VALUE_ENGINES


@TRAIN_ENGINES.register("local")
class LocalTrainEngine(PolicyModel):
    """The policy, whole, on one device."""


@VALUE_ENGINES.register("local")
class LocalValueEngine(ValueModel):
    """The critic, whole, on one device."""
