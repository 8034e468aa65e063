"""One base model and many low-rank adapters, one of which is in the model at a time.

The model has a place for an adapter on each of its linear layers. Using an adapter puts its matrices there, without copying
them, so that sampling and training with one or another costs no more memory than its own matrices.
"""

from __future__ import annotations

import copy
import math
import secrets
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.config.lora import LoraConfig
from posttrain.models.lora import ADAPTER, adapter_layers, add_adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShape:
    """The layers of an adapter, and its rank."""

    rank: int
    attention: bool = True
    mlp: bool = True
    output: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """The matrices of an adapter, float32, by their parameters' names in the model."""

    shape: AdapterShape
    weights: dict[str, nn.Parameter]

    def snapshot(self) -> Adapter:
        """Return a copy that further training does not change."""
        copies = {name: nn.Parameter(weight.detach().clone(), False) for name, weight in self.weights.items()}
        return Adapter(shape=self.shape, weights=copies)

    @property
    def size(self) -> int:
        """Number of weights."""
        return sum(weight.numel() for weight in self.weights.values())


class AdaptedModel:
    """A model with a place for an adapter on each linear layer of its language model."""

    def __init__(self, model: PreTrainedModel, *, alpha: float):
        self.model = model
        self.alpha = alpha
        output: Any = model.get_output_embeddings()
        attention = {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and _attends(name)}
        names = {name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, nn.Linear)}
        # The adapter of an output layer that is tied to the embedding is never merged into both.
        places = LoraConfig(rank=1, alpha=1.0, target_modules=sorted(names))
        with warnings.catch_warnings():  # peft 0.21 warns that it could not be merged
            warnings.simplefilter("ignore", UserWarning)
            add_adapter(model, places, field="model.path", merged=False)
        self._layers: dict[str, Any] = dict(adapter_layers(model))
        self._output: Any = model.get_output_embeddings()
        self._output_name = next((name for name, layer in self._layers.items() if layer is self._output), None)
        self._plain_output = output
        self._attention = attention
        self._settings = copy.deepcopy(self._peft_config)
        self.use(None)

    @property
    def _peft_config(self) -> Any:
        return cast(Any, self.model.peft_config)[ADAPTER]

    def create(self, shape: AdapterShape, seed: int | None) -> Adapter:
        """Make an adapter that does not change the model yet: A is uniform in +-1 / sqrt(inputs), as in peft, and B is 0.

        Args: seed determines A; None draws one.
        """
        generator = torch.Generator().manual_seed(secrets.randbits(62) if seed is None else seed)
        weights = {}
        for name in self._chosen(shape):
            base = self._layers[name].base_layer
            a = torch.empty(shape.rank, base.in_features).uniform_(-1, 1, generator=generator) / math.sqrt(
                base.in_features
            )
            b = torch.zeros(base.out_features, shape.rank)
            for side, values in (("A", a), ("B", b)):
                weights[f"{name}.lora_{side}.{ADAPTER}.weight"] = nn.Parameter(values.to(self.model.device))
        return Adapter(shape=shape, weights=weights)

    def weights_of_rank(self, rank: int) -> int:
        """Return the number of weights of an adapter on all layers."""
        sizes = ((layer.base_layer.in_features, layer.base_layer.out_features) for layer in self._layers.values())
        return sum(rank * (inputs + outputs) for inputs, outputs in sizes)

    def layers_of(self, shape: AdapterShape) -> int:
        """Return the number of layers that an adapter of this shape has."""
        return len(self._chosen(shape))

    def restore(self, shape: AdapterShape, saved: Mapping[str, Tensor]) -> Adapter:
        """Return the saved adapter. Raises: ValueError when its tensors are not those of this shape on this model."""
        adapter = self.create(shape, 0)
        if saved.keys() != adapter.weights.keys():
            raise ValueError("its layers are not those of this model")
        with torch.no_grad():
            for name, weight in adapter.weights.items():
                if saved[name].shape != weight.shape:
                    raise ValueError(f"{name} is {list(saved[name].shape)} there and {list(weight.shape)} here")
                weight.copy_(saved[name])
        return adapter

    def use(self, adapter: Adapter | None) -> None:
        """Put an adapter into the model in place of the one before; None: the base model alone."""
        weights = adapter.weights if adapter else {}
        for name, layer in self._layers.items():
            a = weights.get(f"{name}.lora_A.{ADAPTER}.weight")
            layer._disable_adapters = a is None
            if a is None or adapter is None:
                for side in (layer.lora_A, layer.lora_B):
                    side[ADAPTER].weight = nn.Parameter(torch.empty(0, device=self.model.device), False)
                continue
            layer.lora_A[ADAPTER].weight = a
            layer.lora_B[ADAPTER].weight = weights[f"{name}.lora_B.{ADAPTER}.weight"]
            layer.r[ADAPTER] = adapter.shape.rank
            layer.scaling[ADAPTER] = self.alpha / adapter.shape.rank
        self.model.set_output_embeddings(self._output if self.output_adapted(adapter) else self._plain_output)
        cast(Any, self.model.peft_config)[ADAPTER] = self._config_of(adapter)

    def output_adapted(self, adapter: Adapter | None) -> bool:
        """Return True when an adapter has matrices on the output layer."""
        return adapter is not None and f"{self._output_name}.lora_A.{ADAPTER}.weight" in adapter.weights

    def _config_of(self, adapter: Adapter | None) -> Any:
        """Return peft's settings of an adapter, for its adapter_config.json."""
        settings = copy.deepcopy(self._settings)
        if adapter is not None:
            settings.r, settings.lora_alpha = adapter.shape.rank, self.alpha
            settings.target_modules = set(self._chosen(adapter.shape))
        return settings

    def _chosen(self, shape: AdapterShape) -> list[str]:
        def chosen(name: str) -> bool:
            if name == self._output_name:
                return shape.output
            return shape.attention if name in self._attention else shape.mlp

        return [name for name in self._layers if chosen(name)]


def _attends(name: str) -> bool:
    """Return True for a layer of an attention, by the name of the module that it belongs to."""
    return any("attn" in part or "attention" in part for part in name.split(".")[:-1])
