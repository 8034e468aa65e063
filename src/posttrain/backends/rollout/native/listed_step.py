"""A pass over one token per row as one call of compiled code.

Decoder.step calls a compiled function some nine times a layer. Python needs about as long for these calls as a few rows need for
their attention, and no thread computes meanwhile. Here the same functions are written down with their arguments, in their order,
once for the model's weights; a pass then sets what is new in it, and the whole list is gone through without Python. Results are
equal to Decoder.step's, to the bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from posttrain.backends.rollout.native.cache import KeyValueCache
from posttrain.backends.rollout.native.decoder import Decoder
from posttrain.backends.rollout.native.kernel_parts import (
    KernelActivation,
    KernelGated,
    KernelLayerNorm,
    KernelNorm,
)
from posttrain.backends.rollout.native.kernels import (
    ActivationArguments,
    AttentionArguments,
    GatedArguments,
    Kernels,
    LayerNormArguments,
    NormArguments,
    SumArguments,
    Turn,
)
from posttrain.backends.rollout.native.packed_products import PackedProduct
from posttrain.backends.rollout.native.parts import Attention, Layer, Mlp
from posttrain.backends.rollout.native.slots import TiledSlots


class _Call(ctypes.Structure):
    """One function of the list, laid out like in kernels.cpp."""

    _fields_ = (("function", ctypes.c_void_p), ("arguments", ctypes.c_void_p))


class ListedStep:
    """Decoder.step, of which it takes over the passes whose layers consist of compiled functions alone."""

    def __init__(self, decoder: Decoder):
        self.decoder = decoder
        self._layers: Sequence[Layer] = ()  # that the list was made of
        self._calls: _Calls | None = None

    def __call__(self, token_ids: Tensor, positions: Tensor, cache: KeyValueCache) -> Tensor:
        """See Decoder.step."""
        rows = len(token_ids)
        if self._layers is not self.decoder.layers or (self._calls is not None and self._calls.most_rows < rows):
            self._layers = self.decoder.layers
            self._calls = _Calls(self.decoder, rows) if _is_listable(self.decoder) else None
        # A profile would see one operation in the place of all.
        if self._calls is None or torch._C._autograd._profiler_enabled():
            return self.decoder.step(token_ids, positions, cache)
        hidden = self.decoder.embed(token_ids, positions)
        return self.decoder.norm(self._calls.run(hidden, self.decoder.rotation(hidden, positions), cache))

    def clear(self) -> None:
        """Forget the weights."""
        self._layers, self._calls = (), None


def _is_listable(decoder: Decoder) -> bool:
    """Return True where every part of every layer is a compiled function for rows of the kernels' dtype."""
    kernels = decoder.kernels
    if not isinstance(kernels, Kernels) or not decoder.compiled_attention or decoder.model.dtype != kernels.dtype:
        return False
    width = (decoder.heads + 2 * decoder.kv_heads) * decoder.head_dim
    for layer in decoder.layers:
        mixer, mlp = layer.mixer, layer.mlp
        if not isinstance(mixer, Attention) or not isinstance(mlp, Mlp):
            return False
        if mixer.clip is not None or mixer.norms_last or layer.residual != 1.0:
            return False
        norms = *layer.norms.values(), *(mixer.head_norms or ())
        products: tuple[Any, ...] = (mixer.query_key_value, mixer.output, mlp.first, mlp.down)
        if not isinstance(mlp.between, KernelGated | KernelActivation):
            return False
        if not all(isinstance(norm, KernelNorm | KernelLayerNorm) for norm in norms):
            return False
        # A layer norm of every head by itself would take a call for each
        if not all(isinstance(norm, KernelNorm) for norm in mixer.head_norms or ()):
            return False
        if not all(isinstance(each, PackedProduct) and each.kernels.dtype == kernels.dtype for each in products):
            return False
        if products[0].outputs != width:  # there is a gate behind queries, keys and values
            return False
    return True


class _Calls:
    """The list for the current weights of a decoder, and the tensors between its functions."""

    def __init__(self, decoder: Decoder, rows: int):
        assert isinstance(decoder.kernels, Kernels)
        self.decoder, self.kernels = decoder, decoder.kernels
        self.most_rows = 1 << (rows - 1).bit_length()
        self._listed: list[tuple[Any, ctypes.Structure]] = []
        self.width = int(decoder.model.config.get_text_config().hidden_size)
        # There are two tensors for the hidden states: a sum reads one and writes the other.
        self._states = [torch.empty(self.most_rows, self.width, dtype=self.kernels.dtype) for _ in range(2)]
        self._tensors: dict[tuple[str, int], Tensor] = {}  # the others, by name and width: layers share them
        attentions = (AttentionArguments * len(decoder.layers))()
        self._given = self._states[0]
        for number, layer in enumerate(decoder.layers):
            self._list_layer(number, layer, attentions[number])
        as_numbers: Any = numpy.dtype(AttentionArguments)
        self._attentions = numpy.frombuffer(memoryview(attentions), as_numbers)  # the same memory
        kinds = numpy.array([str(kind) for kind in decoder.kinds])
        self._layers_of = {kind: numpy.flatnonzero(kinds == str(kind)) for kind in set(decoder.kinds)}
        self._calls = (_Call * len(self._listed))(
            *(
                _Call(ctypes.cast(function, ctypes.c_void_p), ctypes.addressof(arguments))
                for function, arguments in self._listed
            )
        )

    def run(self, hidden: Tensor, turns: dict[str | None, Turn], cache: KeyValueCache) -> Tensor:
        """Go through the list. Args: hidden [rows, hidden], which the first layer is given; turns: of every kind of layer.
        Returns: what the last one returns, [rows, hidden], until the next pass."""
        rows, prompts, responses, order = len(hidden), cache.prompts, cache.responses, cache.order
        assert isinstance(responses, TiledSlots) and responses.step == self.kernels.tile_step
        given = self._attentions
        given["prompt_room"], given["response_room"] = prompts.length, responses.length
        rows_of = {"order": order, "prompt_slots": cache.prompt_slots, "prompt_lens": cache.prompt_lens}
        for name, tensor in (rows_of | {"places": cache.places}).items():
            given[name] = tensor.data_ptr()
        for name, slots in (("prompt", prompts), ("response", responses)):
            given[f"{name}_keys"] = [slots.keys[layer].data_ptr() for layer in range(len(given))]
            given[f"{name}_values"] = [slots.values[layer].data_ptr() for layer in range(len(given))]
        rounded = [cache.rounded_prompts(layer) for layer in range(len(given))]
        for name in rounded[0]:
            given[name] = [addresses[name] for addresses in rounded]
        for kind, layers in self._layers_of.items():
            cos, sin, rotated = turns[kind]
            given["cos"][layers], given["sin"][layers], given["rotated"][layers] = (
                cos.data_ptr(),
                sin.data_ptr(),
                rotated,
            )
        self._given[:rows].copy_(hidden)
        self.kernels.run_calls(self._calls, len(self._calls), rows, torch.get_num_threads())
        return self._states[0][:rows]

    def _list_layer(self, number: int, layer: Layer, attention: AttentionArguments) -> None:
        """List what Decoder.layer_step does."""
        decoder, order, mixer, mlp = self.decoder, layer.order, layer.mixer, layer.mlp
        assert isinstance(mixer, Attention) and isinstance(mlp, Mlp)
        heads, kv_heads, dim = decoder.heads, decoder.kv_heads, decoder.head_dim
        before = self._list_norm(layer, order.before_attention, self._hidden, "before")
        projected = self._list_product(mixer.query_key_value, before, "projected")
        row, numbers = (heads + 2 * kv_heads) * dim, self.kernels.dtype.itemsize
        query_key, value = projected, projected + (heads + kv_heads) * dim * numbers
        if mixer.head_norms is not None:
            query_key = self._address("query_key", row)  # laid out as what is projected
            begin = 0
            for norm, count in zip(mixer.head_norms, (heads, kv_heads), strict=True):
                assert isinstance(norm, KernelNorm)
                sizes = (1, count * dim) if mixer.whole_norms else (count, dim)
                self._list_norm_of(norm, projected + begin, query_key + begin, row, *sizes)
                begin += count * dim * numbers
        settings = decoder.attention_settings[number]
        attention.heads, attention.kv_heads, attention.dim = heads, kv_heads, dim
        attention.scaling, attention.window = settings.scaling, settings.window or 0
        attention.softcap = settings.softcap or 0.0
        attention.sinks = None if settings.sinks is None else settings.sinks.data_ptr()
        attention.query_key, attention.value = query_key, value
        attention.query_key_stride = attention.value_stride = row
        attention.output = self._address("attended", heads * dim)
        self._list("attend", attention)
        mixed = self._list_product(mixer.output, attention.output, "mixed")
        if order.parallel:
            if order.before_mlp:
                before = self._list_norm(layer, order.before_mlp, self._hidden, "before")
            self._list_sum(self._list_sum(mixed, self._list_mlp(mlp, before), "both changes"), self._hidden)
            return
        self._list_sum(self._list_norm(layer, order.after_attention, mixed, "normed"), self._hidden)
        changed = self._list_mlp(mlp, self._list_norm(layer, order.before_mlp, self._hidden, "before"))
        self._list_sum(self._list_norm(layer, order.after_mlp, changed, "normed"), self._hidden)

    def _list_mlp(self, mlp: Mlp, rows: int) -> int:
        assert isinstance(mlp.first, PackedProduct)
        given, width = self._list_product(mlp.first, rows, "gate_up"), mlp.first.outputs
        if isinstance(mlp.between, KernelGated):
            between = self._address("between", width // 2)
            self._list("gated", GatedArguments(given, between, width // 2, *mlp.between.form))
        else:
            assert isinstance(mlp.between, KernelActivation)
            between = self._address("between", width)
            self._list("activate", ActivationArguments(given, between, width, mlp.between.kind))
        return self._list_product(mlp.down, between, "changed")

    def _list_sum(self, one: int, other: int, found: str = "") -> int:
        """List a sum of rows; without a name it is the hidden states that follow."""
        if found:
            y = self._address(found, self.width)
        else:
            self._states.reverse()
            y = self._hidden
        self._list("add", SumArguments(one, other, y, self.width))
        return y

    @property
    def _hidden(self) -> int:
        """The address of the hidden states after what is listed so far."""
        return self._states[0].data_ptr()

    def _list_norm(self, layer: Layer, name: str, x: int, found: str) -> int:
        """Return the address of normed rows, of the given ones where there is no norm."""
        if not name:
            return x
        norm, y = layer.norms[name], self._address(found, self.width)
        if isinstance(norm, KernelLayerNorm):
            weight, bias = (None if each is None else each.data_ptr() for each in (norm.weight, norm.bias))
            self._list("layer_norm", LayerNormArguments(x, weight, bias, y, self.width, norm.eps))
            return y
        assert isinstance(norm, KernelNorm)
        self._list_norm_of(norm, x, y, self.width, 1, self.width)
        return y

    def _list_norm_of(self, norm: KernelNorm, x: int, y: int, *sizes: int) -> None:
        self._list("norm", NormArguments(x, norm.weight.data_ptr(), y, *sizes, norm.eps, norm.form))

    def _list_product(self, product: Any, rows: int, found: str) -> int:
        y = self._address(found, product.outputs)
        self._listed.append((product.kernels.multiply, product.arguments(rows, y)))
        return y

    def _list(self, name: str, arguments: ctypes.Structure) -> None:
        self._listed.append((self.kernels.functions[name], arguments))

    def _address(self, name: str, width: int) -> int:
        """Return where the tensor of this name begins, [most_rows, width]."""
        if (name, width) not in self._tensors:
            self._tensors[name, width] = torch.empty(self.most_rows, width, dtype=self.kernels.dtype)
        return self._tensors[name, width].data_ptr()
