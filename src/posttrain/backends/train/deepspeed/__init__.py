"""Models shared out over processes with DeepSpeed's ZeRO, stages 1 to 3 (arXiv:1910.02054)."""

from __future__ import annotations

from posttrain.backends.torch_training.critic import ValueModel
from posttrain.backends.torch_training.policy import PolicyModel
from posttrain.registry import TRAIN_ENGINES, VALUE_ENGINES


@TRAIN_ENGINES.register("deepspeed")
class DeepspeedTrainEngine(PolicyModel):
    """The policy. Give it ``sharding=deepspeed.sharding.DeepspeedSharding(...)``."""


@VALUE_ENGINES.register("deepspeed")
class DeepspeedValueEngine(ValueModel):
    """The critic, in the same way."""
