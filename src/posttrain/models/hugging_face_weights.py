"""A model's weights as a Hugging Face checkpoint would hold them: what samplers that load such checkpoints are sent."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from posttrain.models.lora import is_adapted, merged_weights


@torch.no_grad()
def hugging_face_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors, in the dtype that the model computes in; an adapter is merged into the layers it belongs to.

    A tensor that two names share (tied embeddings) comes once, under the first: loaders tie it again. Layers that transformers
    keeps fused in memory are split as in its files.
    """
    state = merged_weights(model) if is_adapted(model) else model.state_dict()
    seen: set[tuple[int, torch.Size]] = set()
    plain = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        plain[name] = tensor
    yield from revert_weight_conversion(model, plain).items()
