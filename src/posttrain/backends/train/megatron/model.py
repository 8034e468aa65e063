"""A Hugging Face model of the Llama kind as megatron-core's GPT, built from megatron's own parallel layers.

Attention and rotary positions are ours, so that packed rows, shared prompts and split sequences work here as in every other
engine, without Transformer Engine. The output layer only holds its weight: scoring computes log-probs at scored positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedModel

from posttrain.backends.torch_training.sharding import Row
from posttrain.backends.train.megatron.experts import expert_fields, expert_mlp
from posttrain.backends.train.megatron.sharding import MegatronSharding
from posttrain.models.packed_attention import attend_packed
from posttrain.models.sequence_parallel import SplitRow, attend_split
from posttrain.plan.engines.megatron.options import virtual_stages
from posttrain.plan.experts import expert_layers


@dataclass
class RowParams(PackedSeqParams):
    """A packed row, passed unchanged through megatron's layers."""

    layout: Any = None  # models.packed_attention.Packed, or a SplitRow
    position_ids: Tensor | None = None  # [n] int64


def run(model: GPTModel, row: Row) -> Tensor:
    """Run a forward pass over a row. Returns: on the last stage the last hidden states, [1, n, H], or with sequence parallelism
    this rank's tokens of them."""
    params = RowParams(qkv_format="sbhd", layout=row.layout, position_ids=row.position_ids)
    output: Tensor = model(
        input_ids=row.token_ids[None], position_ids=None, attention_mask=None, packed_seq_params=params
    )
    return output


def build(
    source: PreTrainedModel, sharding: MegatronSharding, *, recompute: bool, tied: bool, value_head: str | None
) -> list[GPTModel]:
    """Build this rank's part of the model, without weights: a range of layers, or one for each virtual stage.

    Args: source: the Hugging Face model, accepted by plan.engines.megatron.models.unsupported; recompute the activations of whole
        layers in the backward pass where the settings do not decide; tied: the output layer has the embedding's weight;
        value_head: the name of the last layer of a critic.
    """
    text = source.config.get_text_config()
    dtype, settings = sharding.compute_dtype, sharding.settings
    recomputing = settings.recompute or (
        {"granularity": "full", "method": "uniform", "num_layers": 1} if recompute else {}
    )
    virtual = virtual_stages(settings, layers=text.num_hidden_layers, pipeline=sharding.pipeline)
    experts = expert_layers(text.to_dict())
    of_experts = expert_fields(experts, settings.experts, sharding.tensor) if experts else {}
    # Undoes peft's wrapping.
    names = (name.replace(".base_layer.", ".") for name, _ in source.named_parameters())
    has = {name.partition("self_attn.")[2] for name in names}
    config = TransformerConfig(
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        ffn_hidden_size=text.intermediate_size,
        num_attention_heads=text.num_attention_heads,
        num_query_groups=text.num_key_value_heads,
        kv_channels=head_dim(text),
        normalization="RMSNorm",
        layernorm_epsilon=text.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        add_qkv_bias="q_proj.bias" in has,
        qk_layernorm="q_norm.weight" in has,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=sharding.tensor,
        pipeline_model_parallel_size=sharding.pipeline,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        context_parallel_size=sharding.sequence,
        sequence_parallel=sharding.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        # Rows have any length. Those that are gathered together get one length, and are in no pipeline (expert_problems).
        variable_seq_lengths=settings.experts.dispatcher != "allgather",
        calculate_per_token_loss=True,  # losses are already divided by our counts
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        # Between two stages with virtual ones, activations and gradients travel in both directions, in separate messages.
        overlap_p2p_comm=virtual > 1,
        batch_p2p_comm=sharding.device.type == "cuda" and virtual == 1,
        **({"moe_token_dispatcher_type": settings.experts.dispatcher} | of_experts),
        **settings.split,
        **{f"recompute_{name}": value for name, value in recomputing.items()},
    )
    stretches = [_stretch(source, sharding, config, number, tied=tied) for number in range(virtual)]
    if sharding.last_stage:
        layer = stretches[-1].output_layer
        head = None if value_head is None else getattr(source, value_head)
        stretches[-1].output_layer = WeightOnly(layer.weight) if head is None else WeightOnly(*_like(head, sharding))
    return stretches


def _like(head: Any, sharding: MegatronSharding) -> Iterator[nn.Parameter | None]:
    """Yield weight and bias shaped as in a value head, on this rank's device."""
    for values in (head.weight, head.bias):
        yield None if values is None else nn.Parameter(values.detach().clone().to(sharding.device))


def _stretch(
    source: PreTrainedModel, sharding: MegatronSharding, config: TransformerConfig, number: int, *, tied: bool
) -> GPTModel:
    """Build the layers of this stage's virtual stage ``number``, with the embedding and output layer it has."""
    text, virtual = source.config.get_text_config(), config.virtual_pipeline_model_parallel_size
    vp_stage = None if virtual is None else number
    stage = parallel_state.get_pipeline_model_parallel_rank()
    start = get_transformer_layer_offset(config, vp_stage, stage)
    experts = expert_layers(text.to_dict())
    mlps = [
        expert_mlp(experts) if experts and experts.layers[layer] else _mlp()
        for layer in range(start, start + get_num_layers_to_build(config, vp_stage, stage))
    ]
    first = sharding.first_stage and number == 0
    last = sharding.last_stage and number == (virtual or 1) - 1
    model = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[_layer(config, mlp) for mlp in mlps], layer_norm=Norm),
        vocab_size=-(-vocabulary(source) // sharding.tensor) * sharding.tensor,
        max_sequence_length=text.max_position_embeddings,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        vp_stage=vp_stage,
    )
    rotary: Any = source.base_model.rotary_emb
    model.rotary_pos_emb = Rotary(rotary.inv_freq.to(sharding.device, torch.float32))
    padding: Any = getattr(source.get_input_embeddings(), "padding_idx", None)
    if first and padding is not None:
        model.embedding.register_forward_hook(_without_gradient_of(padding, sharding), with_kwargs=True)
    # Megatron recomputes activations in training mode only. No layer has dropout.
    return model.to(sharding.device).train()


def _without_gradient_of(padding: int, sharding: MegatronSharding) -> Callable[..., Tensor]:
    """Reproduce the ``padding_idx`` of torch's Embedding, which Hugging Face's models have: where the padding token is read
    (a policy may sample it), its row gets no gradient."""

    def embedded(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        is_padding = kwargs["input_ids"][0] == padding  # [n]
        if sharding.sequence_parallel:
            is_padding = is_padding.chunk(sharding.tensor)[sharding.tensor_group.rank()]
        return torch.where(is_padding[:, None, None], output.detach(), output)

    return embedded


def vocabulary(source: PreTrainedModel) -> int:
    """Return the number of rows of a model's embedding."""
    weight: Any = source.get_input_embeddings().weight
    return int(weight.shape[0])


def head_dim(text: Any) -> int:
    """Return the size of an attention head, from a model's configuration."""
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def _mlp() -> ModuleSpec:
    return ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )


def _layer(config: TransformerConfig, mlp: ModuleSpec) -> ModuleSpec:
    norm = Norm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=PackedAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=norm,
                    k_layernorm=norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=Norm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


class Norm(nn.Module):
    """RMS norm as in transformers' models: computed in float32, rounded, then multiplied by its weight."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, states: Tensor) -> Tensor:
        wide = states.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(states.dtype)


class PackedAttention(nn.Module):
    """Attention over the sequences of a packed row, in megatron's calling convention."""

    def __init__(self, config: TransformerConfig, **unused: Any):
        super().__init__()
        assert config.kv_channels is not None
        self.scaling = config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        /,
        *,
        packed_seq_params: RowParams,
        **unused: Any,
    ) -> Tensor:
        """Args: query [n, 1, heads, head_dim]; key, value [n, 1, kv_heads, head_dim]. Returns: [n, 1, heads * head_dim]."""
        query, key, value = (states.permute(1, 2, 0, 3) for states in (query, key, value))
        layout = packed_seq_params.layout
        if isinstance(layout, SplitRow):
            output = attend_split(query, key, value, layout, self.scaling, None)
        else:
            output = attend_packed(query, key, value, layout, self.scaling, None)
        return output.transpose(0, 1).flatten(2)


class Rotary(nn.Module):
    """Rotary angles at the positions of a packed row, which restart in every sequence. The frequencies are those of the Hugging
    Face model, with its scaling."""

    frequencies: Tensor  # [head_dim / 2]

    def __init__(self, frequencies: Tensor):
        super().__init__()
        self.register_buffer("frequencies", frequencies, persistent=False)

    def get_rotary_seq_len(self, *unused: Any) -> Tensor:
        """Return the positions: megatron requests a length here and passes it to ``forward``."""
        params: RowParams = unused[-1]
        assert params.position_ids is not None
        return params.position_ids

    def forward(self, positions: Tensor, **unused: Any) -> Tensor:
        """Compute angles, [n] to [n, 1, 1, head_dim]."""
        angles = positions[:, None].float() * self.frequencies
        return torch.cat([angles, angles], dim=-1)[:, None, None]


class WeightOnly(nn.Module):
    """Replaces the output layer: returns hidden states unchanged."""

    def __init__(self, weight: nn.Parameter | None, bias: nn.Parameter | None = None):
        super().__init__()
        self.weight = weight  # None where it is the embedding's
        self.bias = bias  # of a value head

    def forward(self, hidden: Tensor, **unused: Any) -> tuple[Tensor, None]:
        return hidden, None
