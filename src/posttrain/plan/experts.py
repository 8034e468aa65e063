"""Mixtures of experts: which layers of a model have them, by its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayers:
    """The experts of a model, by its config.json."""

    experts: int  # in a layer
    chosen: int  # of them, for every token
    width: int  # of an expert's MLP
    shared_width: int  # of the MLP beside them that every token goes through; 0: there is none
    normalised: bool  # the weights of the chosen ones add up to 1
    layers: tuple[bool, ...]  # which of the model's layers have experts; the others have an MLP

    def parameters(self, hidden: int) -> int:
        """Count the weights of all experts of all layers; routers and shared experts are not among them."""
        return sum(self.layers) * self.experts * 3 * hidden * self.width


def expert_layers(text: Mapping[str, Any]) -> ExpertLayers | None:
    """Read the fields of a config.json; None for a model without experts. Raises: KeyError for fields it lacks."""
    experts = text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts")
    if not experts:
        return None
    every, plain = text.get("decoder_sparse_step") or 1, text.get("mlp_only_layers") or ()
    first = text.get("first_k_dense_replace") or 0  # DeepSeek and models like it
    layers = tuple(
        number >= first and number not in plain and (number + 1) % every == 0
        for number in range(text["num_hidden_layers"])
    )
    if not any(layers):
        return None
    width = text.get("moe_intermediate_size") or text["intermediate_size"]
    return ExpertLayers(
        experts=experts,
        chosen=text["num_experts_per_tok"],
        width=width,
        shared_width=text.get("shared_expert_intermediate_size") or width * (text.get("n_shared_experts") or 0),
        normalised=text.get("model_type") == "mixtral" or bool(text.get("norm_topk_prob")),
        layers=layers,
    )
