"""Parameters, gradients and optimizer state sharded over processes by FSDP.

Every process makes the same calls with the same batches and gets the same results, as with one process. The shards are
float32 (they are their own masters) and gathered, layer by layer, in the compute precision. With fewer shards than processes
(hybrid sharding, arXiv:2304.11277 section 3.2.2) groups of processes hold equal shards, and gradients are reduced within a
group and then over the groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
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
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from posttrain.backends.torch_training.ranks import RanksSharding, checked
from posttrain.backends.train.fsdp.units import units
from posttrain.models.chunks import Chunk, ChunkedTensors
from posttrain.models.vision import vision_parts
from posttrain.plan.engines.fsdp import FsdpSettings, fsdp_settings

T = TypeVar("T")
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_FORWARD = "posttrain_forward"  # method of the model that FSDP treats as a forward pass


class FsdpSharding(RanksSharding):
    """Args: device_type of the processes' devices; param_dtype to gather and compute in, unless the settings name one; settings
    None shards over all processes; sequence: number of neighbouring processes that share a sequence.

    torch.distributed must be initialised, with a CPU backend as well where shards are offloaded.
    Raises: ModelError in ``wrap`` for layers that the model does not have.
    """

    def __init__(
        self,
        device_type: str,
        *,
        param_dtype: torch.dtype,
        settings: FsdpSettings | None = None,
        sequence: int = 1,
        role: str = "policy",
    ):
        super().__init__(device_type, compute_dtype=param_dtype, sequence=sequence)
        self.settings = settings or FsdpSettings(shard=self.ranks)
        self.offload_optimizer = self.settings.optimizer_offload
        self.mesh: DeviceMesh
        if self.settings.shard < self.ranks:
            shape = self.ranks // self.settings.shard, self.settings.shard
            self.mesh = init_device_mesh(device_type, shape, mesh_dim_names=("replica", "shard"))
        else:
            self.mesh = init_device_mesh(device_type, (self.ranks,), mesh_dim_names=("shard",))
        self.param_dtype = _DTYPES[self.settings.param_dtype] if self.settings.param_dtype else param_dtype
        self.role = role

    @classmethod
    def of_options(
        cls, options: Mapping[str, Any], role: str, *, device_type: str, compute_dtype: torch.dtype, sequence: int
    ) -> Self:
        settings = checked(fsdp_settings(options, dist.get_world_size(), role=role))
        return cls(device_type, param_dtype=compute_dtype, settings=settings, sequence=sequence, role=role)

    def wrap(self, model: PreTrainedModel) -> None:
        """Shard units of parameters that are gathered together, by default one per decoder layer, and one for the rest. Trained
        weights must be float32, which their shards stay."""
        settings = self.settings
        precision = MixedPrecisionPolicy(param_dtype=self.param_dtype, reduce_dtype=_DTYPES[settings.reduce_dtype])
        offload = OffloadPolicy()
        if settings.cpu_offload:
            offload = CPUOffloadPolicy(pin_memory=self.mesh.device_type != "cpu")
        found = units(model, settings, self.role)
        tower = {id(module) for name in vision_parts(model) for module in model.get_submodule(name).modules()}
        for module in found:
            fully_shard(
                module,
                mesh=self.mesh,
                # A tower's layers turn by angles in float32, which stay so
                mp_policy=replace(precision, cast_forward_inputs=False) if id(module) in tower else precision,
                offload_policy=offload,
                reshard_after_forward=settings.reshard_after_forward,
            )
        fully_shard(model, mesh=self.mesh, mp_policy=precision, offload_policy=offload)
        sharded = [cast(FSDPModule, module) for module in [*found, model]]
        for each in sharded:
            # Losses divide by global counts, so gradients must be summed; FSDP would average them.
            each.set_gradient_divide_factor(1.0)
            each.set_force_sum_reduction_for_comms(True)
        if settings.forward_prefetch:
            for this, following in pairwise(sharded[:-1]):
                this.set_modules_to_forward_prefetch([following])
        setattr(model, _FORWARD, lambda run: run())
        register_fsdp_forward_method(model, _FORWARD)

    def forward(self, model: nn.Module, scores: Callable[[], T]) -> T:
        result: T = getattr(model, _FORWARD)(scores)
        return result

    def whole(self, tensor: Tensor) -> Tensor:
        gathered = tensor.detach()
        return super().whole(gathered.full_tensor() if isinstance(gathered, DTensor) else gathered)

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor):
            return super().part(tensor, like)
        # Every process has the whole tensor, so nothing is sent.
        here = tensor.to(like.to_local().device)
        return distribute_tensor(here, like.device_mesh, like.placements, src_data_rank=None)

    def read(self, saved: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
        if not (isinstance(saved, ChunkedTensors) and isinstance(like, DTensor)):
            return super().read(saved, name, like)
        size, offsets = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
        here = saved.part(name, offsets, size).to(like.to_local().device)
        return DTensor.from_local(
            here, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def weights_changed(self, model: PreTrainedModel) -> None:
        """Free the gathered weights: after a forward pass the outermost unit keeps its own for a backward pass, which scoring and
        rows that move nothing do not have."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def chunks(self, tensors: Mapping[str, Tensor]) -> list[Chunk]:
        plain = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
        found = super().chunks(plain)
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor) and _first_copy(tensor) and tensor.to_local().numel():
                place = tensor.__create_chunk_list__()[0]
                found.append(Chunk(name, tuple(place.offsets), tensor.to_local().detach().cpu()))
        return found


def _first_copy(tensor: DTensor) -> bool:
    """Return True when this process is the first of those that hold the same shard of a tensor."""
    coordinate = tensor.device_mesh.get_coordinate() or ()
    return all(place == 0 for place, how in zip(coordinate, tensor.placements, strict=True) if how.is_replicate())
