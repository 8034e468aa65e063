"""DeepSpeed itself: its import, its device setting, and its start on a model.

All uses beyond its documented interface are in this folder, and were checked against 0.19.8.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.plan.engines.deepspeed import ZeroSettings

T = TypeVar("T")
_WORDS = {"float32": "fp32", "bfloat16": "bf16"}


class PassRunner(nn.Module):
    """The module given to DeepSpeed: its forward pass runs any function, which reads the model's parameters."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], T]) -> T:
        return run()


def library(device_type: str) -> Any:
    """Import the package, configured for this type of device."""
    os.environ.setdefault("LOCAL_RANK", "0")  # a worker sees only its own device
    # Its import detects an accelerator, and would take a GPU that the run must not use.
    os.environ.setdefault("DS_ACCELERATOR", device_type)
    import deepspeed

    # Its own reductions over CPU processes are C++ compiled at first use; gloo's need no compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # It calls torch 2.13's collectives by deprecated names.
    warnings.filterwarnings("ignore", r".*_tensor. is deprecated", FutureWarning, "torch.distributed.c10d_logger")
    if not deepspeed.comm.is_initialized():
        backend = "gloo" if device_type == "cpu" else "nccl"
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    return deepspeed


def start(
    model: PreTrainedModel,
    settings: ZeroSettings,
    *,
    device_type: str,
    compute_dtype: torch.dtype,
    optimizer: torch.optim.Optimizer | None = None,
    max_grad_norm: float | None = None,
) -> Any:
    """Start DeepSpeed's engine around a model; without an optimizer for a frozen one, which needs stage 3."""
    half = compute_dtype == torch.bfloat16
    zero = settings.section(model.config.get_text_config().hidden_size)
    if optimizer is None:
        zero.pop("offload_optimizer", None)
    config = {
        # Micro-batches are ours: any number of passes before an update.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": max_grad_norm or 0.0,
        "bf16": {"enabled": half},
        "data_types": {"grad_accum_dtype": _WORDS[settings.accumulation_dtype] if half else "fp32"},
        "communication_data_type": _WORDS[settings.reduce_dtype],
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,  # use torch's fused AdamW, which needs no compiler, on the CPU as well
    }
    passes = PassRunner(model)
    deepspeed = library(device_type)
    with redirect_stdout(io.StringIO()):  # it prints the memory of the machine regardless of settings
        engine, *_ = deepspeed.initialize(model=passes, optimizer=optimizer, config=config, dist_init_required=False)
    if settings.stage == 3:
        _read_outside_of_their_module(passes)
    return engine


def _read_outside_of_their_module(passes: PassRunner) -> None:
    """Keep the output layers' weights, which the fused scores read outside of their module, gathered during every pass."""
    from deepspeed import zero

    head = passes.model.get_output_embeddings()
    for parameter in head.parameters() if head is not None else ():
        zero.register_external_parameter(passes, parameter)


def is_spread(tensor: Tensor) -> bool:
    """Return True for a parameter that stage 3 has sharded."""
    return hasattr(tensor, "ds_tensor")


def gathered(parameter: Tensor) -> Tensor:
    """Gather a sharded parameter into a tensor of its own. A collective call of all processes."""
    from deepspeed import zero

    with zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def replace_spread(parameter: Tensor, value: Tensor) -> None:
    """Set a sharded parameter to a whole value. A collective call of all processes."""
    from deepspeed import zero

    with zero.GatheredParameters([parameter], modifier_rank=0):
        parameter.data.copy_(value)


def set_stretch(parameter: Tensor, values: Callable[[int, int], Tensor], kind: str | None) -> None:
    """Set this process's stretch of the master of a parameter, or of its average ``kind``, under stages 1 and 2. Args: values
    from a number on, so many; not asked for where the process has none.

    DeepSpeed's own safe_set_full_fp32_param wants the whole tensor for it.
    """
    mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]  # set by DeepSpeed
    if mapping is not None:
        place = mapping.lp_fragment_address
        mapping.get_hp_fragment(kind).data.copy_(values(place.start, place.numel))
