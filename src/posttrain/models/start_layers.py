"""Faster layers of a model on a CPU."""

from __future__ import annotations

from transformers import PreTrainedModel

from posttrain.config.model import ModelConfig
from posttrain.libraries.cpu_kernels.load import allow_kernels
from posttrain.models.fused_layers import fuse_layers
from posttrain.models.wide_products import widen_products


def fuse_on_cpu(model: PreTrainedModel, config: ModelConfig) -> None:
    """Fuse layers on the CPU only, without torch.compile, which fuses more; on a GPU it was not measured. The setting also
    decides about this process's other kernels for updates."""
    allow_kernels(config.fused_layers)
    if config.fused_layers and not config.compile and not config.liger and model.device.type == "cpu":
        fuse_layers(model)
        widen_products(model)
