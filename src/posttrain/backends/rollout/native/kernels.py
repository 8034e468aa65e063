"""Compiled kernels of the decoding pass for this processor (kernels.cpp): one call each instead of ten torch operations.

They need a C++ compiler, once: the library is kept in the user's cache folder. Only speed depends on them.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from posttrain.backends.rollout.native.cache import KeyValueCache
from posttrain.backends.rollout.native.rounded_prompts import ADDRESSES, RoundingKernel
from posttrain.backends.rollout.native.slots import LENGTH_STEP, TiledSlots
from posttrain.libraries.cpu_kernels.build import compiled_library
from posttrain.libraries.cpu_kernels.update import NormForm
from posttrain.models.attention_settings import AttentionSettings

SOURCE = Path(__file__).with_name("kernels.cpp")
LANES = 16  # as in kernels.cpp: no width is smaller
DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


class GateKind(IntEnum):
    """Kinds of gated activations, numbered like in kernels.cpp: silu; gelu, approximated by tanh; gpt-oss's."""

    SILU = 0
    GELU = 1
    CLAMPED = 2


class ActivationKind(IntEnum):
    """Activations without a gate, numbered like in kernels.cpp."""

    RELU = 0
    SQUARED_RELU = 1
    SILU = 2
    GELU = 3
    GELU_TANH = 4


class NormArguments(ctypes.Structure):
    """Arguments of a norm, laid out like in kernels.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "y")),
        *((name, ctypes.c_int64) for name in ("stride", "count", "width")),
        ("eps", ctypes.c_float),
        ("form", ctypes.c_int),
    )


class LayerNormArguments(ctypes.Structure):
    """Arguments of a norm around the mean, laid out like in kernels.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "y")),
        ("width", ctypes.c_int64),
        ("eps", ctypes.c_float),
    )


class ActivationArguments(ctypes.Structure):
    """Arguments of an activation, laid out like in kernels.cpp."""

    _fields_ = (("x", ctypes.c_void_p), ("y", ctypes.c_void_p), ("width", ctypes.c_int64), ("kind", ctypes.c_int64))


class GatedArguments(ctypes.Structure):
    """Arguments of a gated activation, laid out like in kernels.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "y")),
        *((name, ctypes.c_int64) for name in ("width", "kind")),
        *((name, ctypes.c_float) for name in ("slope", "limit")),
    )


class ExpertsArguments(ctypes.Structure):
    """Arguments of a mixture of experts, laid out like in experts.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "y", "chosen", "shares", "first", "last")),
        *((name, ctypes.c_void_p) for name in ("given", "both", "between", "found", "multiply")),
        *((name, ctypes.c_int64) for name in ("hidden", "width", "each", "experts", "kind")),
        *((name, ctypes.c_float) for name in ("slope", "limit")),
    )


class SumArguments(ctypes.Structure):
    """Arguments of a sum, laid out like in kernels.cpp."""

    _fields_ = (*((name, ctypes.c_void_p) for name in ("one", "other", "y")), ("width", ctypes.c_int64))


class AttentionArguments(ctypes.Structure):
    """Arguments of attention, laid out like in kernels.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim", "rotated", "window")),
        *((name, ctypes.c_int64) for name in ("prompt_room", "response_room", "query_key_stride", "value_stride")),
        *((name, ctypes.c_void_p) for name in ("order", "prompt_slots", "prompt_lens", "places")),
        *((name, ctypes.c_void_p) for name in ("query_key", "value", "cos", "sin", "prompt_keys", "prompt_values")),
        *((name, ctypes.c_void_p) for name in ("response_keys", "response_values", "output", "sinks")),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
        *((name, ctypes.c_void_p) for name in ADDRESSES),
    )


class _Prefill(ctypes.Structure):
    """Arguments of the attention kernel for prompts, as in kernels.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("pieces", "heads", "kv_heads", "dim", "rotated", "window", "room")),
        *((name, ctypes.c_int64) for name in ("query_key_stride", "value_stride")),
        *((name, ctypes.c_void_p) for name in ("starts", "ends", "slots", "known")),
        *(
            (name, ctypes.c_void_p)
            for name in ("query_key", "value", "cos", "sin", "keys", "values", "output", "sinks")
        ),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
        ("threads", ctypes.c_int),
    )


class GateForm(NamedTuple):
    """The activation of a gate, and what it multiplies."""

    kind: GateKind = GateKind.SILU
    slope: float = 1.0  # s of x sigmoid(s x), in the place of silu
    limit: float = 0.0  # CLAMPED: the gate is at most this, and the other factor within it, and one more


class Turn(NamedTuple):
    """The position embedding of some tokens: x cos + (x with its first ``rotated`` numbers rolled by half) sin."""

    cos: Tensor  # [rows, 1, head_dim] float32, contiguous; 1 after the rotated numbers
    sin: Tensor  # [rows, 1, head_dim] float32, contiguous; with the signs of the rotation; 0 after the rotated numbers
    rotated: int  # numbers at the beginning of a head

    def of(self, x: Tensor) -> Tensor:
        """Turn numbers, [rows, heads, head_dim]."""
        rolled = torch.cat([x[..., : self.rotated].roll(self.rotated // 2, dims=-1), x[..., self.rotated :]], dim=-1)
        return torch.addcmul(x * self.cos, rolled, self.sin).to(x.dtype)

    def without(self) -> Turn:
        """Return a position embedding that leaves numbers as they are."""
        return Turn(torch.ones_like(self.cos), torch.zeros_like(self.sin), 0)


class PassKernels(Protocol):
    """Kernels for what a pass computes between its products, for tensors of one dtype on one kind of device."""

    dtype: torch.dtype
    narrowest: int  # width that the kernels can compute

    @property
    def tile_step(self) -> int | None:
        """Step of the responses' TiledSlots, where they read those."""

    def norm(self, x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
        """Compute x / sqrt(mean(x^2) + eps), times the weight in one of the forms.

        Args: x [..., width]; weight [width]. Returns: [..., width], contiguous.
        """

    def gated(self, gate_up: Tensor, form: GateForm) -> Tensor:
        """Compute the activation of the first half of a row, times the second.

        Args: gate_up [rows, 2 * width] contiguous. Returns: [rows, width].
        """

    def attend(
        self,
        cache: KeyValueCache,
        layer: int,
        query_key: Tensor,
        value: Tensor,
        turn: Turn,
        settings: AttentionSettings,
    ) -> Tensor:
        """Rotate queries and keys by their positions, store keys and values, and compute the attention of every row.

        Args: query_key [rows, heads + kv_heads, head_dim] and value [rows, kv_heads, head_dim], each contiguous in a row;
            settings: with sinks in float32.
        Returns: [rows, heads * head_dim].
        """


class Kernels:
    """Kernels for CPU tensors of one dtype whose widths are LANES at least. See PassKernels."""

    narrowest = LANES

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype):
        assert LENGTH_STEP == LANES  # tokens of a tile
        self.dtype = dtype
        pointer, number, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        kinds = {
            "norm": NormArguments,
            "layer_norm": LayerNormArguments,
            "activate": ActivationArguments,
            "gated": GatedArguments,
            "mix_experts": ExpertsArguments,
            "add": SumArguments,
            "attend": AttentionArguments,
        }
        # By name: functions of the address of their arguments, a number of rows and one of threads
        self.functions = {name: getattr(library, f"{name}_{DTYPES[dtype]}") for name in kinds}
        for name, function in self.functions.items():
            function.argtypes = (ctypes.POINTER(kinds[name]), number, threads)
            function.restype = None
        self._prefill = getattr(library, f"prefill_{DTYPES[dtype]}")
        self._prefill.argtypes = (ctypes.POINTER(_Prefill),)
        self._draw = getattr(library, f"draw_{DTYPES[dtype]}")
        self._draw.argtypes = (pointer, pointer, ctypes.c_float, number, number, pointer, pointer, threads)
        self._draw.restype = None
        step = getattr(library, f"tile_step_{DTYPES[dtype]}")
        step.restype = number
        self.tile_step = int(step())
        self._prefill.restype = None
        self.rounding = RoundingKernel(library, DTYPES[dtype])
        self.run_calls = library.run_calls
        self.run_calls.argtypes = (pointer, number, number, threads)
        self.run_calls.restype = None

    def norm(self, x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
        x = x.contiguous()
        width = len(weight)
        output = torch.empty_like(x)
        given = NormArguments(x.data_ptr(), weight.data_ptr(), output.data_ptr(), width, 1, width, eps, form)
        self.functions["norm"](given, x.numel() // width, torch.get_num_threads())
        return output

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        """Compute (x - mean) / sqrt(variance + eps) over the last dimension, times the weight, plus the bias.

        Args: x [..., width]; weight, bias [width]. Returns: [..., width], contiguous.
        """
        x = x.contiguous()
        width, output = x.shape[-1], torch.empty_like(x)
        addresses = (None if each is None else each.data_ptr() for each in (weight, bias))
        given = LayerNormArguments(x.data_ptr(), *addresses, output.data_ptr(), width, eps)
        self.functions["layer_norm"](given, x.numel() // width, torch.get_num_threads())
        return output

    def activate(self, x: Tensor, kind: ActivationKind) -> Tensor:
        """Compute an activation without a gate. Args: x [rows, width] contiguous. Returns: the same shape."""
        output = torch.empty_like(x)
        given = ActivationArguments(x.data_ptr(), output.data_ptr(), x.shape[1], kind)
        self.functions["activate"](given, len(x), torch.get_num_threads())
        return output

    def gated(self, gate_up: Tensor, form: GateForm) -> Tensor:
        rows, width = len(gate_up), gate_up.shape[1] // 2
        output = gate_up.new_empty(rows, width)
        given = GatedArguments(gate_up.data_ptr(), output.data_ptr(), width, *form)
        self.functions["gated"](given, rows, torch.get_num_threads())
        return output

    def attend(
        self,
        cache: KeyValueCache,
        layer: int,
        query_key: Tensor,
        value: Tensor,
        turn: Turn,
        settings: AttentionSettings,
    ) -> Tensor:
        """See PassKernels.attend. Rows of one prompt read it together."""
        rows, turned, dim = query_key.shape
        heads = turned - cache.kv_heads
        cos, sin, rotated = turn
        prompts, responses = cache.prompts, cache.responses
        assert isinstance(responses, TiledSlots) and responses.step == self.tile_step
        output = query_key.new_empty(rows, heads * dim)
        self.functions["attend"](
            AttentionArguments(
                heads=heads,
                kv_heads=cache.kv_heads,
                dim=dim,
                rotated=rotated,
                window=settings.window or 0,
                prompt_room=prompts.length,
                response_room=responses.length,
                query_key_stride=query_key.stride(0),
                value_stride=value.stride(0),
                order=cache.order.data_ptr(),
                prompt_slots=cache.prompt_slots.data_ptr(),
                prompt_lens=cache.prompt_lens.data_ptr(),
                places=cache.places.data_ptr(),
                query_key=query_key.data_ptr(),
                value=value.data_ptr(),
                cos=cos.data_ptr(),
                sin=sin.data_ptr(),
                prompt_keys=prompts.keys[layer].data_ptr(),
                prompt_values=prompts.values[layer].data_ptr(),
                response_keys=responses.keys[layer].data_ptr(),
                response_values=responses.values[layer].data_ptr(),
                output=output.data_ptr(),
                sinks=None if settings.sinks is None else settings.sinks.data_ptr(),
                scaling=settings.scaling,
                softcap=settings.softcap or 0.0,
                **cache.rounded_prompts(layer),
            ),
            rows,
            torch.get_num_threads(),
        )
        return output

    def prefill(
        self,
        cache: KeyValueCache,
        layer: int,
        parts: Tensor,
        query_key: Tensor,
        value: Tensor,
        turn: Turn,
        settings: AttentionSettings,
    ) -> Tensor:
        """Rotate queries (in place) and keys by their positions, store keys and values in prompt slots, and compute the causal
        attention of every token over what its slot then holds.

        Args: parts [4, n] int64: first row, end, slot and number of the known tokens before the first, of each part;
            query_key [rows, heads + kv_heads, head_dim] and value [rows, kv_heads, head_dim], each contiguous in a row;
            settings: with sinks in float32.
        Returns: [rows, heads * head_dim]; rows in no part are not set.
        """
        rows, turned, dim = query_key.shape
        heads, (cos, sin, rotated), prompts = turned - cache.kv_heads, turn, cache.prompts
        output = query_key.new_empty(rows, heads * dim)
        starts, ends, slots, known = parts
        self._prefill(
            _Prefill(
                pieces=parts.shape[1],
                heads=heads,
                kv_heads=cache.kv_heads,
                dim=dim,
                rotated=rotated,
                window=settings.window or 0,
                room=prompts.length,
                query_key_stride=query_key.stride(0),
                value_stride=value.stride(0),
                starts=starts.data_ptr(),
                ends=ends.data_ptr(),
                slots=slots.data_ptr(),
                known=known.data_ptr(),
                query_key=query_key.data_ptr(),
                value=value.data_ptr(),
                cos=cos.data_ptr(),
                sin=sin.data_ptr(),
                keys=prompts.keys[layer].data_ptr(),
                values=prompts.values[layer].data_ptr(),
                output=output.data_ptr(),
                sinks=None if settings.sinks is None else settings.sinks.data_ptr(),
                scaling=settings.scaling,
                softcap=settings.softcap or 0.0,
                threads=torch.get_num_threads(),
            )
        )
        return output

    def draw(self, logits: Tensor, random: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Draw one token per row from softmax(logits / temperature); at temperature 0 the likeliest, with its log-prob at 1.

        Args: logits [B, vocabulary], those of excluded tokens -inf; random [B] float in [0, 1).
        Returns: tokens [B] int64, logprobs [B] float32 nats; NaN where a row holds NaN or inf.
        """
        logits, random = logits.contiguous(), random.double().contiguous()
        rows, vocabulary = logits.shape
        tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        given = logits.data_ptr(), random.data_ptr(), temperature, rows, vocabulary
        self._draw(*given, tokens.data_ptr(), logprobs.data_ptr(), torch.get_num_threads())
        return tokens, logprobs


def load_kernels(dtype: torch.dtype) -> Kernels | str:
    """Load the kernels for tensors of ``dtype``, one of DTYPES, compiling them if necessary. Returns: them, or why not."""
    library = compiled_library(SOURCE)
    return library if isinstance(library, str) else Kernels(library, dtype)
