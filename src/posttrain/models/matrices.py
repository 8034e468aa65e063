"""The matrices of hidden layers, which some optimizers treat on their own."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from posttrain.models.value_head import HEADS


def hidden_matrices(model: nn.Module) -> set[str]:
    """Return the names of parameters that are matrices of hidden layers: weights of linear layers and of experts, whose stack has
    three dimensions; not embeddings, output layers, convolutions, norms or biases."""
    heads = [getattr(model, name, None) for name in HEADS]
    if isinstance(model, PreTrainedModel):
        heads.append(model.get_output_embeddings())
    outside = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    outside += [module for module in heads if module is not None]
    left_out = {id(weight) for module in outside for weight in module.parameters()}
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    return {
        name
        for name, weight in model.named_parameters()
        if id(weight) not in left_out
        and (
            (weight.dim() == 2 and (id(weight) in linear or "lora_" in name))
            or (weight.dim() == 3 and ".experts." in name)
        )
    }
