"""Optimizer state, gradients and weights sharded over processes by DeepSpeed's ZeRO.

Every process makes the same calls with the same batches and gets the same results, as with one process. Unlike in the other
engines, norm, clipping and update are a single operation of DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.backends.torch_training.ranks import RanksSharding, checked
from posttrain.backends.train.deepspeed import library
from posttrain.backends.train.deepspeed.weights import ZeroWeights
from posttrain.models.chunks import Chunk
from posttrain.plan.engines.deepspeed import ZeroSettings, zero_settings

T = TypeVar("T")


class DeepspeedSharding(RanksSharding):
    """Args: device_type of the processes' devices; compute_dtype of the passes, float32 or bfloat16; sequence: number of
    neighbouring processes that share a sequence.

    torch.distributed must be initialised, with a CPU backend as well where shards are offloaded.
    """

    skips_backward = False  # its hooks count passes in both directions

    def __init__(
        self,
        device_type: str,
        *,
        compute_dtype: torch.dtype,
        settings: ZeroSettings | None = None,
        sequence: int = 1,
    ):
        super().__init__(device_type, compute_dtype=compute_dtype, sequence=sequence)
        self.settings = settings or ZeroSettings()
        self._engine: Any = None

    @classmethod
    def of_options(
        cls, options: Mapping[str, Any], role: str, *, device_type: str, compute_dtype: torch.dtype, sequence: int
    ) -> Self:
        settings = checked(zero_settings(options, dist.get_world_size(), role=role))
        return cls(device_type, compute_dtype=compute_dtype, settings=settings, sequence=sequence)

    def wrap(self, model: PreTrainedModel) -> None:
        """Shard a frozen model by stage 3; a trained model is sharded once its optimizer exists."""
        if self.settings.stage == 3 and not any(weight.requires_grad for weight in model.parameters()):
            self._engine = self._start(model)

    def chunks(self, tensors: Mapping[str, Tensor]) -> list[Chunk]:
        raise NotImplementedError("its parts are stretches of all weights in a row; plan.checks.engines refuses it")

    def masters(self, model: PreTrainedModel, dtype: torch.dtype) -> ZeroWeights:
        def begin(optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> Any:
            self._engine = self._start(model, optimizer=optimizer, max_grad_norm=max_grad_norm)
            return self._engine

        return ZeroWeights(model, begin, self.rank, self.ranks)

    def _start(self, model: PreTrainedModel, **more: Any) -> Any:
        return library.start(
            model, self.settings, device_type=self.device_type, compute_dtype=self.compute_dtype, **more
        )

    def forward(self, model: nn.Module, scores: Callable[[], T]) -> T:
        result: T = self._engine(scores) if self._engine is not None else scores()
        return result

    def whole(self, tensor: Tensor) -> Tensor:
        return super().whole(library.gathered(tensor) if library.is_spread(tensor) else tensor)

    def assign(self, parameter: Tensor, value: Tensor) -> None:
        if library.is_spread(parameter):
            library.replace_spread(parameter, value)
        else:
            super().assign(parameter, value)

    def shape(self, tensor: Tensor) -> torch.Size:
        return tensor.ds_shape if library.is_spread(tensor) else tensor.shape  # type: ignore[attr-defined]
