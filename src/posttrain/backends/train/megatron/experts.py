"""A layer's experts behind megatron-core's router and dispatchers, which send every token to the ranks of its experts.

Weights have the layout of Hugging Face's models: all experts of a layer in one tensor. Only the products are ours:
megatron-core's grouped products need CUDA and a library built against it; torch's work everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, linear, silu

from posttrain.models.experts import takes_grouped_products
from posttrain.plan.engines.megatron.experts import ExpertSettings
from posttrain.plan.experts import ExpertLayers


def expert_fields(experts: ExpertLayers, settings: ExpertSettings, tensor: int) -> dict[str, Any]:
    """Return fields of TransformerConfig for a model with experts, whose other matrices ``tensor`` ranks share."""
    over, one_over = settings.split(tensor)
    return {
        "num_moe_experts": experts.experts,
        "moe_router_topk": experts.chosen,
        "moe_ffn_hidden_size": experts.width,
        "moe_shared_expert_intermediate_size": experts.shared_width or None,
        "moe_shared_expert_gate": experts.shared_width > 0,
        # Softmax over the chosen experts equals softmax over all, normalised to sum to 1.
        "moe_router_pre_softmax": not experts.normalised,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": settings.router_dtype,
        "moe_token_dispatcher_type": settings.dispatcher,
        "moe_grouped_gemm": settings.grouped,
        "expert_model_parallel_size": over,
        "expert_tensor_parallel_size": one_over,
    }


def expert_mlp(experts: ExpertLayers) -> ModuleSpec:
    """Return the spec that replaces the MLP in a layer with experts."""
    shared = ModuleSpec(
        module=SharedExpertMLP,
        submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
    )
    submodules = MoESubmodules(experts=Experts, shared_experts=shared if experts.shared_width else None, router=Router)
    return ModuleSpec(module=MoELayer, submodules=submodules)


class Router(TopKRouter):
    """megatron-core's router, with a plain product for its logits: its own (0.16) needs Transformer Engine."""

    # Sees the logits, weights and choice of every pass, and returns the weights (expert_choice)
    watch: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def gating(self, states: Tensor) -> Tensor:
        """Compute logits, [n, 1, H] to [n, 1, experts], in the dtype of routers."""
        dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(self.config.moe_router_dtype or "", states.dtype)
        return linear(states.to(dtype), self.weight.to(dtype))

    def routing(self, logits: Tensor, *unused: Any, **also_unused: Any) -> tuple[Tensor, Tensor]:
        """Choose experts. Args: logits [..., experts]. Returns: their weights and the choice, both [n, experts]."""
        weights, chosen = super().routing(logits, *unused, **also_unused)
        if self.watch is not None:
            weights = self.watch(logits.view(chosen.shape), weights, chosen)
        return weights, chosen


class Experts(nn.Module):
    """This rank's experts, or its shard of each where ranks share one: with two ranks half of the gate, of the up projection, and
    of the down projection's inputs. The output is then a summand, which the dispatcher reduces.

    Shapes: gate_up [E, 2 I, H], the gate above the up projection; down [E, H, I].
    """

    def __init__(self, count: int, config: TransformerConfig, **unused: Any):
        super().__init__()
        assert config.moe_ffn_hidden_size is not None
        width = config.moe_ffn_hidden_size // parallel_state.get_expert_tensor_parallel_world_size()
        self.grouped = config.moe_grouped_gemm and takes_grouped_products(config.hidden_size, width)
        self.gate_up = nn.Parameter(torch.empty(count, 2 * width, config.hidden_size, dtype=config.params_dtype))
        self.down = nn.Parameter(torch.empty(count, config.hidden_size, width, dtype=config.params_dtype))

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Apply the experts. Args: tokens [n, H], sorted by expert; tokens per expert [E]; weights [n]. Returns: [n, H]."""
        if self.grouped:
            ends = tokens_per_expert.cumsum(0).to(tokens.device, torch.int32)
            gate, up = grouped_mm(tokens, self.gate_up.transpose(1, 2), offs=ends).chunk(2, dim=1)
            output = grouped_mm(silu(gate) * up, self.down.transpose(1, 2), offs=ends)
        else:
            parts = []
            for part, gate_up, down in zip(
                tokens.split(tokens_per_expert.tolist()), self.gate_up, self.down, strict=True
            ):
                gate, up = linear(part, gate_up).chunk(2, dim=1)
                parts.append(linear(silu(gate) * up, down))
            output = torch.cat(parts)
        return (output * weights[:, None]).to(tokens.dtype), None
