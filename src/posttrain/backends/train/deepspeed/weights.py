"""Trained weights updated by DeepSpeed: float32 masters and averages in flat shards, one per process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.backends.torch_training.master_weights import MasterWeights, Shards
from posttrain.backends.torch_training.optimizers import build_optimizer
from posttrain.backends.train.deepspeed import library
from posttrain.config.policy import OptimizerConfig
from posttrain.models.chunks import shapes_of, stretch_of

AVERAGES = ("exp_avg", "exp_avg_sq")  # of AdamW


class ZeroWeights(MasterWeights):
    """``parameters`` are the model's own, in the compute dtype; their masters are inside DeepSpeed.

    Args: begin starts DeepSpeed's engine for an optimizer over them and a limit of the gradient norm.
    """

    def __init__(
        self, model: PreTrainedModel, begin: Callable[[torch.optim.Optimizer, float | None], Any], rank: int, ranks: int
    ):
        self._trained: dict[str, nn.Parameter] = {
            name: weight for name, weight in model.named_parameters() if weight.requires_grad
        }
        self._begin, self._rank, self._ranks = begin, rank, ranks
        self._held = False
        self._shadowed = []  # none of these is rounded here

    @property
    def hold_gradients(self) -> bool:
        return self._held

    def optimizer(self, settings: OptimizerConfig) -> torch.optim.Optimizer:
        """Build AdamW over the flat shards, with which DeepSpeed replaces the parameters."""
        exact = {name: weight.detach().clone() for name, weight in self.parameters.items()}
        optimizer = build_optimizer(self.parameters, settings)
        self._engine = self._begin(optimizer, settings.max_grad_norm)
        self._zero = self._engine.optimizer
        for flat in self._flat_parts():
            # Otherwise the first update creates them, and no checkpoint could be loaded before.
            averages = {kind: torch.zeros_like(flat, requires_grad=False) for kind in AVERAGES}
            optimizer.state[flat] = {"step": torch.zeros((), device=flat.device), **averages}
        if not self._in_parts:
            # Locates each weight's averages in them.
            self._zero._lazy_init_hp_params_optimizer_state()
        self._load(exact)  # replaces the masters that DeepSpeed made of rounded weights
        return optimizer

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass. DeepSpeed averages over processes, but our losses, divided by global counts, must be summed."""
        self._held = True
        self._engine.backward(loss * self._ranks, scale_wrt_gas=False)

    def step(
        self, optimizer: torch.optim.Optimizer, limit: float | None, sharding: Shards, *, offload: bool = False
    ) -> float:
        """Update. Norm, clipping and update are DeepSpeed's, which knows the limit; it skips non-finite gradients."""
        self._engine.step()
        self._held = False
        return float(self._engine.get_global_grad_norm())

    def zero_grad(self) -> None:
        """Drop the gradients by an update without effect: DeepSpeed has no other way to drop reduced gradients."""
        if not self._held:
            return
        with _still(self._zero.optimizer):
            self._engine.step()
        self._held = False

    def whole(self, sharding: Shards) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_fp32_param

        for name, weight in self.parameters.items():
            yield name, _own(safe_get_full_fp32_param(weight))

    def averages(self, optimizer: torch.optim.Optimizer, sharding: Shards) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_optimizer_state

        step = next(iter(optimizer.state.values()))["step"].detach().cpu()
        for name, weight in self.parameters.items():
            yield f"step:{name}", step.clone()
            for kind in AVERAGES:
                yield f"{kind}:{name}", _own(safe_get_full_optimizer_state(weight, kind))

    def load(self, tensors: Mapping[str, Tensor], sharding: Shards) -> None:
        self._load(tensors)

    @torch.no_grad()
    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, weight in self.parameters.items():
            self._put(weight, tensors, name)
        self._publish()

    @torch.no_grad()
    def load_averages(
        self,
        optimizer: torch.optim.Optimizer,
        saved: Mapping[str, Tensor],
        sharding: Shards,
        *,
        offload: bool = False,
    ) -> None:
        names = shapes_of(saved)
        step = max((float(saved[name]) for name in names if name.startswith("step:")), default=0.0)
        for state in optimizer.state.values():
            state["step"].fill_(step)
            for kind in AVERAGES:
                state[kind].zero_()
        for kind_and_name in names:
            kind, name = kind_and_name.split(":", 1)
            if kind in AVERAGES:
                self._put(self.parameters[name], saved, kind_and_name, kind)

    # ------------------------------------------------------------------------------------------------------------ inside

    @property
    def _in_parts(self) -> bool:
        """Return True for stage 3, which shards each weight; stages 1 and 2 shard the flat row of all weights."""
        return bool(self._engine.zero_optimization_stage() == 3)

    def _flat_parts(self) -> list[Tensor]:
        names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
        found: list[Tensor] = next(getattr(self._zero, name) for name in names if hasattr(self._zero, name))
        return found

    def _put(self, weight: nn.Parameter, saved: Mapping[str, Tensor], name: str, kind: str | None = None) -> None:
        """Write this process's stretch of a saved tensor to the master, or an average, of a weight; of files no more is read."""
        from deepspeed import utils

        if not self._in_parts:
            library.set_stretch(weight, lambda first, count: stretch_of(saved, name, first, count).float(), kind)
            return
        size = weight.ds_tensor.ds_numel  # type: ignore[attr-defined]  # set by DeepSpeed on sharded parameters
        first = min(self._rank * size, weight.ds_numel)  # type: ignore[attr-defined]
        count = min(size, weight.ds_numel - first)  # type: ignore[attr-defined]
        part = torch.zeros(size)  # the last shard may be padded
        part[:count] = stretch_of(saved, name, first, count)
        if kind is None:
            utils.safe_set_local_fp32_param(weight, part)
        else:
            utils.safe_set_local_optimizer_state(weight, part, kind)

    def _publish(self) -> None:
        """Round the masters to the model, as after an update."""
        if not self._in_parts:
            self._zero.update_lp_params()
            return
        for number in range(len(self._flat_parts())):
            self._zero._reassign_or_swap_out_partitioned_parameters(number)
        kept = self._zero.persistent_parameters
        if kept:
            kept[0].partition(kept)
            kept[0].all_gather(kept)
        self._zero.invalidate_secondary_tensor()  # the secondary copies, made again in the next pass


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().float().cpu().clone()


@contextmanager
def _still(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Make the optimizer's steps no-ops inside the ``with`` block."""
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del optimizer.step
