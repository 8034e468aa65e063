"""Training engine on torch's ``fully_shard`` (FSDP2) over several processes; arXiv:2304.11277 describes the idea."""

from __future__ import annotations

import torch

from posttrain.backends.torch_training.critic import ValueModel
from posttrain.backends.torch_training.policy import PolicyModel
from posttrain.backends.train.fsdp.sharding import FsdpSharding
from posttrain.config import TrainingConfig
from posttrain.registry import TRAIN_ENGINES, VALUE_ENGINES


@TRAIN_ENGINES.register("fsdp")
class FsdpTrainEngine(PolicyModel):
    """The policy, every weight sharded over the processes. Requires ``sharding=fsdp.sharding.FsdpSharding(...)``."""

    @staticmethod
    def sharding_of(
        config: TrainingConfig, role: str, device: torch.device, compute_dtype: torch.dtype
    ) -> FsdpSharding:
        return FsdpSharding.of_run(config, role, device.type, compute_dtype)


@VALUE_ENGINES.register("fsdp")
class FsdpValueEngine(ValueModel):
    """The critic. Requires the same sharding."""
