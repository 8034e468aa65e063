"""LoRA (arXiv:2106.09685) on megatron-core's parallel layers, each of which combines several of a Hugging Face model's.

An adapter's output is computed besides its layer's, and sharded alike: where rows of the matrix are sharded, A is replicated
and B's rows are sharded; where columns are, A's columns are and B is replicated. So the communicated tensors are only
as wide as the adapters' rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from posttrain.backends.train.megatron.sharding import MegatronSharding
from posttrain.backends.train.megatron.weights import ADAPTABLE, ADAPTERS, LAYER, Cut, Heads
from posttrain.errors import ModelError, Problem
from posttrain.models.lora import ADAPTER, adapter_layers
from posttrain.models.value_head import HEADS


def put_adapters(
    stretches: Sequence[GPTModel], source: PreTrainedModel, heads: Heads, sharding: MegatronSharding
) -> None:
    """Add to every parallel layer of these stages the adapters of ``source``'s layers; their values are loaded later.

    Raises: ModelError where a layer without a parallel layer has one, or one has dropout.
    """
    adapted = dict(adapter_layers(source))
    if not adapted:
        return
    section = "critic.lora" if any(hasattr(source, name) for name in HEADS) else "policy.lora"
    tables = {
        within: row
        for within, row in LAYER.items()
        if row[0] in ADAPTABLE and within.endswith(".weight") and "experts" not in within
    }
    known = {name.removesuffix(".weight") for _, names in tables.values() for name in names}
    # model.layers.3.self_attn.q_proj: the layer's number, and the name within the layer
    unknown = sorted({name for name in adapted if not name.startswith("model.layers.") or _within(name) not in known})
    if unknown:
        what = f"megatron has no adapter for {unknown[0]}"
        leaves = ", ".join(sorted({name.rpartition(".")[2] for name in known}))
        fix = f"name target_modules among {leaves}, or use the engine fsdp"
        raise ModelError(Problem(what, fix=fix, field=f"{section}.target_modules"))
    if any(isinstance(layer.lora_dropout[ADAPTER], nn.Dropout) for layer in adapted.values()):
        what = "the adapter has dropout, and megatron's ranks would not drop the same inputs"
        raise ModelError(Problem(what, fix=f"use {section}.dropout=0, or the engine fsdp", field=f"{section}.dropout"))
    for stretch in stretches:
        for layer in stretch.decoder.layers:
            for within, (cut, names) in tables.items():
                own = [
                    adapted.get(f"model.layers.{layer.layer_number - 1}.{name.removesuffix('.weight')}")
                    for name in names
                ]
                if any(own):
                    parallel = layer.get_submodule(within.removesuffix(".weight"))
                    short = [name.removesuffix(".weight").rpartition(".")[2] for name in names]
                    parallel.add_module(
                        ADAPTERS, Adapters(dict(zip(short, own, strict=True)), cut, heads, parallel, sharding)
                    )
                    parallel.register_forward_hook(_with_adapters)
        if stretch.pre_process:
            stretch.embedding.register_forward_hook(_carry_gradient)


class Adapters(nn.Module):
    """The adapters of one parallel layer.

    Args: sources, the layers of the Hugging Face model that it combines, with their adapters or None, in order; cut: its
        sharding.
    """

    def __init__(self, sources: Mapping[str, Any], cut: Cut, heads: Heads, parallel: Any, sharding: MegatronSharding):
        super().__init__()
        self._sources = tuple(sources.items())  # not as modules: they belong to the Hugging Face model
        self._tokens_shared = sharding.sequence_parallel
        self._by_columns = cut == "columns"
        # With more ranks than key/value heads, a rank's rows are part of a group: each computes the group and keeps its own part.
        self._all_rows = cut == "heads" and sharding.tensor > heads.key_value
        self._part, self._parts = sharding.tensor_group.rank(), sharding.tensor
        self._groups = heads.key_value // (1 if self._all_rows else sharding.tensor) if cut == "heads" else 1
        per_group = (heads.per_group * heads.dim, heads.dim, heads.dim)
        rows, columns = parallel.weight.shape
        even = [rows // len(sources)] * len(sources)
        self._rows = [size * self._groups for size in per_group] if cut == "heads" else even
        for (name, layer), height in zip(self._sources, self._rows, strict=True):
            if layer is not None:
                rank = layer.r[ADAPTER]
                for side, shape in (("A", (rank, columns)), ("B", (height, rank))):
                    self.register_parameter(f"{name}_{side}", nn.Parameter(parallel.weight.new_empty(shape)))

    def forward(self, states: Tensor) -> Tensor | None:
        """Return their sum, [n, 1, rows], to add to the layer's product with its input [n, 1, columns]; None while disabled."""
        adapted = [(name, layer) for name, layer in self._sources if layer is not None]
        if any(layer._disable_adapters for _, layer in adapted):
            return None
        narrow = linear(states, torch.cat([getattr(self, f"{name}_A") for name, _ in adapted]))
        if self._by_columns:  # every rank has a summand
            reduce = (
                reduce_scatter_to_sequence_parallel_region
                if self._tokens_shared
                else reduce_from_tensor_model_parallel_region
            )
            narrow = reduce(narrow)
        elif self._tokens_shared:
            narrow = gather_from_sequence_parallel_region(narrow, tensor_parallel_output_grad=True)
        else:
            narrow = copy_to_tensor_model_parallel_region(narrow)
        inputs = dict(
            zip(
                (name for name, _ in adapted), narrow.split([layer.r[ADAPTER] for _, layer in adapted], -1), strict=True
            )
        )
        added = [
            narrow.new_zeros(*narrow.shape[:-1], rows)
            if layer is None
            else linear(inputs[name], getattr(self, f"{name}_B")) * layer.scaling[ADAPTER]
            for (name, layer), rows in zip(self._sources, self._rows, strict=True)
        ]
        fused = torch.cat([each.unflatten(-1, (self._groups, -1)) for each in added], dim=-1).flatten(-2)
        return fused.chunk(self._parts, dim=-1)[self._part] if self._all_rows else fused


def _with_adapters(parallel: nn.Module, args: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[Any, ...]:
    added = parallel.get_submodule(ADAPTERS)(args[0])
    return output if added is None else (output[0] + added, *output[1:])


def _carry_gradient(embedding: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Make the embedding's output require gradient: with frozen weights the input of the first layer would not, and recomputed
    layers then give their parameters no gradient."""
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output


def _within(name: str) -> str:
    """Return the name of a module within its layer."""
    return name.split(".", 3)[3]
