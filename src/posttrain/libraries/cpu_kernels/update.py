"""Compiled kernels for an update's work between its matrix products (update.cpp): one pass over memory each, instead of one per
torch operation.

They are used in a process once each has been compared with torch's operations (load.py, trial.py).
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("update.cpp")
DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}

_POINTER, _NUMBER, _FLOAT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_double
_FLAG, _THREADS = ctypes.c_bool, ctypes.c_int
ARGUMENTS = {
    "norm_forward": (_POINTER, _POINTER, _FLOAT, ctypes.c_int, _NUMBER, _NUMBER, _POINTER, _POINTER),
    "norm_backward": (*[_POINTER] * 4, ctypes.c_int, _NUMBER, _NUMBER, _POINTER, _POINTER),
    "gated_forward": (_POINTER, _POINTER, _NUMBER, _NUMBER, _FLAG, _NUMBER, _NUMBER, _POINTER),
    "gated_backward": (*[_POINTER] * 3, _NUMBER, _NUMBER, _FLAG, _NUMBER, _NUMBER, _POINTER, _POINTER, _NUMBER),
    "rotate": (_POINTER, _NUMBER, _NUMBER, _POINTER, _POINTER, _FLAG, _NUMBER, _NUMBER, _NUMBER, _POINTER),
    "tile_forward": (_POINTER, _NUMBER, _NUMBER, _FLOAT, _POINTER, _NUMBER, *[_POINTER] * 5),
    "tile_backward": (_POINTER, _NUMBER, _NUMBER, _FLOAT, *[_POINTER] * 5, _FLOAT, _POINTER, _NUMBER),
    "add": (_POINTER, _POINTER, _NUMBER),
    "adamw": (*[_POINTER] * 5, _NUMBER, *[_DOUBLE] * 7),
}


class NormForm(IntEnum):
    """An RMS norm's order of operations, as in the C++ sources."""

    ROUNDED = 0  # times the weight, after rounding to the dtype: Llama
    ONE_MORE = 1  # times 1 + the weight, before rounding: Gemma
    UNROUNDED = 2  # times the weight, before rounding: OLMo 2


class UpdateKernels:
    """Kernels for CPU tensors of one dtype. Sums are taken in float32, and results rounded once. All tensors are contiguous
    where nothing else is said."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype):
        self.dtype = dtype
        self._functions = {}
        for name, arguments in ARGUMENTS.items():
            function = getattr(library, f"{name}_{DTYPES[dtype]}")
            function.argtypes, function.restype = (*arguments, _THREADS), None
            self._functions[name] = function

    def _call(self, name: str, *arguments: object) -> None:
        given = (each.data_ptr() if isinstance(each, Tensor) else each for each in arguments)
        self._functions[name](*given, torch.get_num_threads())

    def norm_forward(self, x: Tensor, weight: Tensor, eps: float, form: NormForm) -> tuple[Tensor, Tensor]:
        """Compute x / sqrt(mean(x^2) + eps), times the weight in one of the forms.

        Args: x [..., width]; weight [width]. Returns: [..., width]; the factors 1 / sqrt(...), [rows] float32.
        """
        width = len(weight)
        rows = x.numel() // width
        output, scales = torch.empty_like(x), torch.empty(rows)
        self._call("norm_forward", x, weight, eps, form, rows, width, output, scales)
        return output, scales

    def norm_backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, scales: Tensor, form: NormForm, *, for_x: bool, for_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Compute the gradients of x, in its dtype, and of the weight, in float32, where they are wanted."""
        width = len(weight)
        grad_x = torch.empty_like(x) if for_x else None
        grad_weight = torch.empty(width) if for_weight else None
        self._call("norm_backward", grad, x, weight, scales, form, len(scales), width, grad_x, grad_weight)
        return grad_x, grad_weight

    def gated_forward(self, gate: Tensor, up: Tensor, *, gelu: bool) -> Tensor:
        """Compute silu (or gelu, approximated by tanh) of gate, times up.

        Args: gate, up [rows, width], each contiguous in a row.
        """
        output = gate.new_empty(gate.shape)
        self._call("gated_forward", gate, up, gate.stride(0), up.stride(0), gelu, *gate.shape, output)
        return output

    def gated_backward(self, grad: Tensor, gate: Tensor, up: Tensor, *, gelu: bool) -> Tensor:
        """Compute the gradients of gate and up. Returns: [2, rows, width], or where these are halves of one tensor
        [rows, 2 * width], in the same order."""
        rows, width = gate.shape
        halves = gate.stride(0) == 2 * width and up.data_ptr() == gate.data_ptr() + width * gate.element_size()
        both = gate.new_empty((rows, 2 * width) if halves else (2, rows, width))
        of_gate, of_up = both.split(width, dim=1) if halves else both
        given = (grad, gate, up, gate.stride(0), up.stride(0), gelu, rows, width, of_gate, of_up, of_gate.stride(0))
        self._call("gated_backward", *given)
        return both

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, *, backward: bool = False) -> Tensor:
        """Compute x cos + (-second half, first half of x) sin; backward, the product with the transposed matrix.

        Args: x [rows, heads, dim], contiguous in a head; cos, sin [rows, dim]; dim even. Returns: [rows, heads, dim].
        """
        output = x.new_empty(x.shape)
        self._call("rotate", x, x.stride(0), x.stride(1), cos, sin, backward, *x.shape, output)
        return output

    def tile_forward(
        self,
        tile: Tensor,
        factor: float,
        targets: Tensor,
        begin: int,
        chosen: Tensor,
        sums: tuple[Tensor, Tensor, Tensor, Tensor | None],
    ) -> None:
        """Sum up what softmax needs of a tile of logits x = factor * tile, [rows, width], whose first column is ``begin``: the
        largest of a row, and with e = exp(x - largest) the sums of e, e (x - largest) and, where it is wanted, e^2, each [rows]
        float32. The targets' x are written into ``chosen``, [rows] float32, where they are in the tile."""
        self._call("tile_forward", tile, *tile.shape, factor, targets, begin, chosen, *sums)

    def tile_backward(
        self,
        tile: Tensor,
        factor: float,
        targets: Tensor,
        begin: int,
        *,
        shift: Tensor | None,
        of_logprobs: Tensor,
        of_entropy: Tensor | None,
        entropies: Tensor,
        at_target: Tensor,
        by: float,
    ) -> None:
        """Replace a tile [rows, width] by the gradient of its logits: with log p = factor * tile - shift it is
        -by * p (of_logprobs + of_entropy (log p + entropies)), and at the target at_target; each but the tile [rows] float32."""
        rows_of = (shift, of_logprobs, of_entropy, entropies, at_target)
        self._call("tile_backward", tile, *tile.shape, factor, *rows_of, by, targets, begin)

    def add(self, addend: Tensor, total: Tensor) -> None:
        """Add to a float32 tensor of the same shape, in place."""
        self._call("add", addend, total, total.numel())

    def adamw(
        self,
        weight: Tensor,
        grad: Tensor,
        averages: tuple[Tensor, Tensor],
        copy: Tensor | None,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        steps: int,
        clip: float = 1.0,
    ) -> None:
        """Make the update number ``steps``, from 1 on, of a float32 weight, in place, with gradients times ``clip``, and
        round it into the copy, of this class's dtype, where there is one."""
        numbers = (lr, *betas, eps, weight_decay, float(steps), clip)
        self._call("adamw", weight, grad, *averages, copy, weight.numel(), *numbers)
