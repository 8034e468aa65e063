"""Parameters, gradients and optimizer state in parts, one per process; micro-batches dealt out by their tokens.

Every process makes the same calls with the same batches and gets the same results, as with one process. The weights are
float32 in parts (they are their own masters) and gathered, layer by layer, in the precision to compute in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from posttrain.algos.balancing import balanced_parts
from posttrain.backends.torch_training.sharding import Sharding

T = TypeVar("T")
_FORWARD = "posttrain_forward"  # the method of the model that FSDP takes for a forward pass


class FsdpSharding(Sharding):
    """Args: device_type of the processes' devices; param_dtype to gather and compute in; reshard_after_forward gives a
    layer's gathered weights up until the backward pass; cpu_offload keeps the parts in CPU memory.

    torch.distributed must be initialised.
    """

    splits_when_out_of_memory = False

    def __init__(
        self,
        device_type: str,
        *,
        param_dtype: torch.dtype,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
    ):
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.mesh: DeviceMesh = init_device_mesh(device_type, (self.ranks,))
        self.param_dtype = param_dtype
        self.reshard_after_forward = reshard_after_forward
        self.offload: OffloadPolicy = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()

    def wrap(self, model: PreTrainedModel) -> None:
        """One group of parameters per decoder layer, one of the rest. The model must be float32."""
        precision = MixedPrecisionPolicy(param_dtype=self.param_dtype, reduce_dtype=torch.float32)
        layers = [module for module in model.modules() if type(module).__name__ in _layer_names(model)]
        for module in layers:
            fully_shard(
                module,
                mesh=self.mesh,
                mp_policy=precision,
                offload_policy=self.offload,
                reshard_after_forward=self.reshard_after_forward,
            )
        fully_shard(model, mesh=self.mesh, mp_policy=precision, offload_policy=self.offload)
        for module in [*layers, model]:
            # Losses divide by counts of the whole mini-batch, so gradients add up; FSDP would take their mean.
            sharded = cast(FSDPModule, module)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        setattr(model, _FORWARD, lambda run: run())
        register_fsdp_forward_method(model, _FORWARD)

    def forward(self, model: nn.Module, scores: Callable[[], T]) -> T:
        result: T = getattr(model, _FORWARD)(scores)
        return result

    def deal(self, parts: list[list[int]], loads: Sequence[int]) -> list[list[int]]:
        """Karmarkar-Karp: the same number of micro-batches for everyone, of about the same number of tokens in all."""
        missing = -len(parts) % self.ranks
        filled, weights = parts + [[]] * missing, [*loads, *[0] * missing]
        mine = balanced_parts(weights, self.ranks, equal_size=True)[self.rank]
        return [filled[part] for part in mine]

    def joined(self, values: Tensor, rows: Sequence[int], count: int) -> Tensor:
        out = super().joined(values, rows, count).to(self.mesh.device_type)
        dist.all_reduce(out)  # every row is somebody's, and 0 elsewhere
        return out.cpu()

    def total(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Processes that ran empty micro-batches alone may lack names that others have."""
        everyone: list[dict[str, float]] = [{} for _ in range(self.ranks)]
        dist.all_gather_object(everyone, dict(sums))
        names = {name for each in everyone for name in each}
        return {name: sum(each.get(name, 0.0) for each in everyone) for name in sorted(names)}

    def whole(self, tensor: Tensor) -> Tensor:
        gathered = tensor.detach()
        return super().whole(gathered.full_tensor() if isinstance(gathered, DTensor) else gathered)

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor):
            return super().part(tensor, like)
        return distribute_tensor(tensor.to(like.to_local().device), like.device_mesh, like.placements)

    def wait(self) -> None:
        dist.barrier()


def save_parts(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Every process writes its part of every tensor: safetensors with the places of the parts, by torch.distributed.checkpoint.
    Any number of processes can read them."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    state_dict_saver.save(dict(tensors), storage_writer=writer)


def load_parts(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Fill these tensors, each process its part, from what ``save_parts`` wrote."""
    into: dict[str, Any] = dict(tensors)
    state_dict_loader.load(into, storage_reader=HuggingFaceStorageReader(str(folder)))


def _layer_names(model: PreTrainedModel) -> set[str]:
    """Class names of the layers that transformers says should stay in one piece."""
    return set(model._no_split_modules or [])
