"""megatron-core on a machine without CUDA, where some of its functions request the current CUDA device.

Inside ``on_this_machine`` they get the CPU, and an empty state of CUDA's random numbers, which a forward pass without dropout
does not use. With CUDA nothing changes. Written for megatron-core 0.16; a release that uses the device of its arguments
makes this file unnecessary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import token_dispatcher


def on_this_machine() -> AbstractContextManager[None]:
    """Replace these functions inside the ``with`` block, where megatron-core is built and run."""
    return nullcontext() if torch.cuda.is_available() else _on_cpu()


@contextmanager
def _on_cpu() -> Iterator[None]:
    replaced: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor),
        (random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.empty(0)),
        (random, "_set_cuda_rng_state", lambda *args, **kwargs: None),
        (random, "get_cuda_rng_tracker", _NoStates),
        (tensor_parallel, "get_cuda_rng_tracker", _NoStates),
        (schedules, "torch", _CpuTorch()),
        (torch.cuda, "Stream", _NoStream),
        (torch.cuda, "current_stream", lambda device=None: None),
        (torch.cuda, "stream", lambda stream: nullcontext()),
        (torch.distributed, "all_gather", _all_gather),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _as_it_is),
    ]
    before = [getattr(owner, name) for owner, name, _ in replaced]
    try:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(replaced, before, strict=True):
            setattr(owner, name, value)


class _NoStates:
    """Megatron's table of CUDA random states, empty."""

    def fork(self, name: str = "") -> AbstractContextManager[None]:
        return nullcontext()

    def get_states(self) -> dict[str, Any]:
        return {}

    def set_states(self, states: dict[str, Any]) -> None:
        return None


class _CpuTorch:
    """torch as the schedules use it: they create a counter on the device "cuda", by that name."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @property
    def zeros(self) -> Callable[..., torch.Tensor]:
        return lambda *size, device=None, **kwargs: torch.zeros(*size, **kwargs)


class _NoStream:
    """Replaces the stream on which megatron copies numbers to the CPU; here they are there already."""

    def wait_stream(self, stream: Any) -> None:
        return None

    def record_event(self) -> _NoStream:
        return self

    def synchronize(self) -> None:
        return None


def _as_it_is(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return a tensor, which is on the CPU already; sizes of exchanged tensors must be numbers."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


_equal_all_gather = torch.distributed.all_gather


def _all_gather(found: list[torch.Tensor], mine: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Gather tensors of several sizes: gloo supports only equal ones, but the experts' tokens differ."""
    if len({len(each) for each in found}) == 1:
        return _equal_all_gather(found, mine, group=group, async_op=async_op)
    longest = max(len(each) for each in found)
    filled = torch.cat([mine, mine.new_zeros(longest - len(mine), *mine.shape[1:])])
    whole = [torch.empty_like(filled) for _ in found]
    _equal_all_gather(whole, filled, group=group)
    for each, arrived in zip(found, whole, strict=True):
        each.copy_(arrived[: len(each)])
    return None
