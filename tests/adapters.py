"""Models with adapters that do something, for tests."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from posttrain.config.lora import LoraConfig
from posttrain.models import lora
from posttrain.models.loading import load_causal_lm


def adapted(folder: Path, config: LoraConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model with an adapter whose B is not 0, on weights in 4 bits where ``config`` says so."""
    model = load_causal_lm(str(folder), dtype=dtype)
    lora.add_adapter(model, config, seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return model
