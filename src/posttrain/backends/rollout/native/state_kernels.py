"""Compiled kernels of layers that keep a state (states.cpp): a call for all tokens of a layer, of prompts or of responses."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from posttrain.backends.rollout.native.kernels import DTYPES
from posttrain.libraries.cpu_kernels.build import compiled_library

SOURCE = Path(__file__).with_name("states.cpp")


class _Sequences(ctypes.Structure):
    """The sequences of a call, as in states.cpp."""

    _fields_ = (
        ("count", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("starts", "ends", "slots", "known", "first_slots")),
        *((name, ctypes.c_void_p) for name in ("first_inputs", "rows", "inputs", "output")),
        ("threads", ctypes.c_int),
    )


class _Convolution(ctypes.Structure):
    """A short convolution, as in states.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("channels", "taps")),
        *((name, ctypes.c_void_p) for name in ("weights", "bias")),
    )


class _Delta(ctypes.Structure):
    """A gated delta rule, as in states.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("key_heads", "value_heads", "key_dim", "value_dim")),
        *((name, ctypes.c_void_p) for name in ("decay", "step_bias", "norm", "first_states", "states", "between")),
        *((name, ctypes.c_float) for name in ("eps", "share")),
    )


class Parts(NamedTuple):
    """Sequences whose tokens lie side by side in the rows of a call, [n] int64 each.

    One with ``known`` tokens before these continues the states of its slot. Another one begins with those of its first slot,
    where there are any, and else with zeros; what it leaves is stored in its slot.
    """

    starts: Tensor
    ends: Tensor
    slots: Tensor
    known: Tensor
    first_slots: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Convolution:
    """A causal convolution of each channel alone."""

    weights: Tensor  # [taps, channels] float32, contiguous
    bias: Tensor | None  # [channels] float32

    @property
    def record(self) -> _Convolution:
        taps, channels = self.weights.shape
        bias = None if self.bias is None else self.bias.data_ptr()
        return _Convolution(channels, taps, self.weights.data_ptr(), bias)


@dataclass(frozen=True, slots=True, eq=False)
class DeltaRule:
    """A gated delta rule behind a convolution (arXiv:2412.06464), with the norm and the gate of what it reads.

    A head's state S [key_dim, value_dim] becomes d S + k (b (v - d S'k))', and q reads S'q; k and q have length 1 and
    1 / sqrt(key_dim); d = exp(-decay softplus(step + step_bias)) and b = share sigmoid(.) of every token.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    decay: Tensor  # [value_heads] float32, positive
    step_bias: Tensor  # [value_heads] float32
    norm: Tensor  # [value_dim] float32
    eps: float
    share: float
    convolution: Convolution

    @property
    def channels(self) -> int:
        """Numbers of a token's queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


class StateKernels:
    """Kernels for CPU tensors of one dtype."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype):
        self.dtype = dtype
        library.most_taps.restype = ctypes.c_int64
        self.most_taps: int = library.most_taps()  # of a convolution
        self._delta_rule = getattr(library, f"delta_rule_{DTYPES[dtype]}")
        self._short = getattr(library, f"short_convolution_{DTYPES[dtype]}")
        records = _Sequences, _Convolution, _Delta
        self._delta_rule.argtypes = tuple(map(ctypes.POINTER, records))
        self._short.argtypes = tuple(map(ctypes.POINTER, records[:2]))
        self._delta_rule.restype = self._short.restype = None

    def delta_rule(
        self,
        rule: DeltaRule,
        parts: Parts,
        rows: Tensor,
        inputs: Tensor,
        states: Tensor,
        first: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Compute a layer between its products, and its new states.

        Args: rows [N, channels + value_heads * (value_dim + 2)] contiguous: queries, keys, values, gates, shares and steps;
            inputs [slots, taps, channels] of the rows' dtype: the last ones of the convolution; states [slots, value_heads,
            key_dim, value_dim] float32; first: inputs and states of the first slots. All but the rows are contiguous.
        Returns: [N, value_heads * value_dim]; rows of no part are not set.
        """
        output = rows.new_empty(len(rows), rule.value_heads * rule.value_dim)
        between = torch.empty(len(rows), rule.channels)
        record = _Delta(
            key_heads=rule.key_heads,
            value_heads=rule.value_heads,
            key_dim=rule.key_dim,
            value_dim=rule.value_dim,
            decay=rule.decay.data_ptr(),
            step_bias=rule.step_bias.data_ptr(),
            norm=rule.norm.data_ptr(),
            first_states=None if first is None else first[1].data_ptr(),
            states=states.data_ptr(),
            between=between.data_ptr(),
            eps=rule.eps,
            share=rule.share,
        )
        sequences = _sequences(parts, rows, inputs, output, None if first is None else first[0])
        self._delta_rule(sequences, rule.convolution.record, record)
        return output

    def short_convolution(
        self, convolution: Convolution, parts: Parts, rows: Tensor, inputs: Tensor, first: Tensor | None = None
    ) -> Tensor:
        """Compute C times the convolution of B x, and the new inputs.

        Args: rows [N, 3 * channels] contiguous: B, C and x; inputs, first: as in ``delta_rule``. Returns: [N, channels].
        """
        output = rows.new_empty(len(rows), convolution.weights.shape[1])
        self._short(_sequences(parts, rows, inputs, output, first), convolution.record)
        return output


def _sequences(parts: Parts, rows: Tensor, inputs: Tensor, output: Tensor, first: Tensor | None) -> _Sequences:
    first_slots = parts.first_slots
    return _Sequences(
        count=len(parts.starts),
        stride=rows.stride(0),
        starts=parts.starts.data_ptr(),
        ends=parts.ends.data_ptr(),
        slots=parts.slots.data_ptr(),
        known=parts.known.data_ptr(),
        first_slots=None if first_slots is None else first_slots.data_ptr(),
        first_inputs=None if first is None else first.data_ptr(),
        rows=rows.data_ptr(),
        inputs=inputs.data_ptr(),
        output=output.data_ptr(),
        threads=torch.get_num_threads(),
    )


@cache
def load_state_kernels(dtype: torch.dtype) -> StateKernels | str:
    """Load the kernels for tensors of ``dtype``, one of DTYPES, compiling them if necessary. Returns: them, or why not."""
    library = compiled_library(SOURCE)
    return library if isinstance(library, str) else StateKernels(library, dtype)
