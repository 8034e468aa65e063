"""Training engine on DeepSpeed's ZeRO, stages 1 to 3 (arXiv:1910.02054), over several processes."""

from __future__ import annotations

import torch

from posttrain.backends.torch_training.critic import ValueModel
from posttrain.backends.torch_training.policy import PolicyModel
from posttrain.backends.train.deepspeed.sharding import DeepspeedSharding
from posttrain.config import TrainingConfig
from posttrain.registry import TRAIN_ENGINES, VALUE_ENGINES


@TRAIN_ENGINES.register("deepspeed")
class DeepspeedTrainEngine(PolicyModel):
    """The policy. Requires ``sharding=deepspeed.sharding.DeepspeedSharding(...)``."""

    @staticmethod
    def sharding_of(
        config: TrainingConfig, role: str, device: torch.device, compute_dtype: torch.dtype
    ) -> DeepspeedSharding:
        return DeepspeedSharding.of_run(config, role, device.type, compute_dtype)


@VALUE_ENGINES.register("deepspeed")
class DeepspeedValueEngine(ValueModel):
    """The critic. Requires the same sharding."""
