"""Layers whose past is a state of fixed size instead of keys and values: linear attention, short convolutions.

transformers' modules compute such a layer over the sequences of a batch. In a packed row, where sequences lie side by side, the
layer is given each of them apart: padded at their ends, which nothing before them sees, and behind a shared prompt with the state
that the prompt leaves. A sampler's cache holds a state for every prompt and every response.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PretrainedConfig, PreTrainedModel

from posttrain.errors import ModelError, Problem
from posttrain.models.attention import KNOWN
from posttrain.models.buckets import Bucket
from posttrain.models.packed_attention import Packed

# By what name a layer takes transformers' cache; those of attention also take position embeddings.
CACHES = ("cache_params", "past_key_values")
KINDS = frozenset({"linear_attention", "conv"})  # of layers, in a configuration
# A single token after a state is computed by an update in place, which has no gradient.
SHORTEST = 2

KeptStates = dict[tuple[int, str, int], Tensor]  # of one sequence: by layer, kind and number
Compute = Callable[[Tensor, "LayerState | None"], Tensor]


class StateCache(Protocol):
    """A sampler's cache of states."""

    states: States
    prompt_slots: Tensor  # [rows] int64: of the announced rows
    places: Tensor  # [rows] int64: tokens of their responses that are cached

    @property
    def decodes(self) -> bool:
        """False when a prefill is announced."""

    @property
    def parts(self) -> Sequence[tuple[int, int, int, int]]:
        """The announced prefill: (start, end, slot, known tokens) of each prompt."""


class States:
    """States of prompts and responses: for each layer and kind a tensor per slot."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int, str, int], Tensor] = {}

    def put(self, owner: str, slots: Tensor, layer: int, state: LayerState) -> None:
        """Store the states of these slots of the owner, "prompt" or "response"."""
        needed = int(slots.max()) + 1
        for (kind, number), values in state.items():
            held = self.room(owner, layer, kind, needed, values.new_empty(0, *values.shape[1:]), number)
            held[slots] = values

    def room(self, owner: str, layer: int, kind: str, slots: int, like: Tensor, number: int = 0) -> Tensor:
        """Return the states of one kind, [at least ``slots``, ...], zeros where there were none; they may be written to.

        Args: like [any, ...]: of their shape, dtype and device. The last inputs of convolutions, kind "conv", [slots, channels,
            taps], have the channels side by side in memory.
        """
        key = owner, layer, kind, number
        held = self._held.get(key)
        if held is None or len(held) < slots:
            shape = slots + slots // 2, *like.shape[1:]
            grown = (
                like.new_zeros(shape[0], *reversed(shape[1:])).transpose(1, 2)
                if kind == "conv"
                else like.new_zeros(shape)
            )
            if held is not None:
                grown[: len(held)] = held
            held = self._held[key] = grown
        return held

    def get(self, owner: str, slots: Tensor, layer: int) -> LayerState:
        """Return copies of the states of these slots; zeros where a slot has none."""
        found = LayerState()
        for (whose, at, kind, number), held in self._held.items():
            if (whose, at) == (owner, layer):
                inside = slots.clamp(max=len(held) - 1)
                found.set(kind, number, held[inside])
        return found

    def take(self, owner: str, slot: int) -> KeptStates:
        """Copy the states of one slot, of all layers."""
        found = ((key[1:], held) for key, held in self._held.items() if key[0] == owner and slot < len(held))
        return {key: held[slot].clone() for key, held in found}

    def put_back(self, owner: str, slot: int, kept: KeptStates) -> None:
        """Store what was taken in a slot."""
        for (layer, kind, number), value in kept.items():
            self.room(owner, layer, kind, slot + 1, value[None], number)[slot] = value

    def move(self, owner: str, source: int, target: int) -> None:
        """Copy the states of one slot over those of another."""
        for (whose, *_), held in self._held.items():
            if whose == owner:
                held[target] = held[source]


class LayerState:
    """The states of one layer for a batch of sequences. Stands in for transformers' cache in a call of the layer."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], Tensor] = {}

    def items(self) -> Iterator[tuple[tuple[str, int], Tensor]]:
        yield from self._found.items()

    def set(self, kind: str, number: int, value: Tensor) -> None:
        self._found[kind, number] = value

    def rows(self, index: Tensor) -> LayerState:
        """Return the states of some sequences."""
        found = LayerState()
        for (kind, number), value in self.items():
            found.set(kind, number, value[index])
        return found

    def mixed(self, other: LayerState, takes: Tensor) -> LayerState:
        """Return the other's states where ``takes`` [sequences] is True, and these elsewhere."""
        found = LayerState()
        for key, value in other.items():
            own = self._found.get(key)
            wide = takes.view(-1, *(1 for _ in value.shape[1:]))
            found.set(*key, value if own is None else torch.where(wide, value, own))
        return found

    # ------------------------------------------------------------------------------- as transformers' layers call it

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._found.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._found.get(("recurrent", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Keep the last inputs of a convolution, as many as its kernel is wide. Returns: those before with the new ones."""
        before = self.get_conv_state(layer_idx, state_idx)
        whole = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        width = conv_kernel_size or (before.shape[-1] if before is not None else conv_states.shape[-1])
        self.set("conv", state_idx, pad(whole, (max(width - whole.shape[-1], 0), 0))[..., -width:])
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.set("recurrent", state_idx, recurrent_states)
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        return bool(self._found)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


def layers_with_keys(config: PretrainedConfig) -> list[int]:
    """Return the numbers of a model's layers that have keys and values. Args: config, of its text."""
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    return [number for number, kind in enumerate(kinds) if kind not in KINDS]


def has_states(config: PretrainedConfig) -> bool:
    """Return True for the configuration of a model with layers that keep a state."""
    return bool(KINDS & set(getattr(config.get_text_config(), "layer_types", None) or []))


def separate_sequences(model: PreTrainedModel, field: str) -> None:
    """Have the layers of a model that keep a state compute the sequences of a packed row apart.

    Raises: ModelError for layers of another form than those that are known.
    """
    if not has_states(model.config):
        return
    kinds = model.config.get_text_config().layer_types
    found = [module for module in model.modules() if _cache_name(module)]
    if len(found) != sum(kind in KINDS for kind in kinds):
        what = f"the layers of {type(model).__name__} at {model.name_or_path} that keep a state are of an unknown form"
        raise ModelError(Problem(what, fix=KNOWN, field=field))
    for module in found:
        kind, name = type(module), _cache_name(module)
        # A class rather than a function of the module: copies of the model have their own.
        module.__class__ = type(kind.__name__, (_Separate, kind), {"__module__": kind.__module__, "cache_name": name})


def state_module(layer: nn.Module) -> Any:
    """Return the part of a layer that keeps a state and computes sequences apart; None where there is none."""
    return next((part for part in layer.children() if isinstance(part, _Separate)), None)


def _cache_name(module: nn.Module) -> str:
    """Return by what name a module takes transformers' cache, where it keeps a state; "" for other modules."""
    if not hasattr(module, "layer_idx") or not any("conv" in name for name, _ in module.named_children()):
        return ""
    return next((name for name in CACHES if name in inspect.signature(type(module).forward).parameters), "")


class _Separate:
    """Comes before a module's own class."""

    cache_name: str
    layer_idx: int

    def forward(self, hidden_states: Tensor, **inputs: Any) -> Tensor:
        """Compute the layer. Args: hidden_states [1, N, H] of a packed row, or [rows, 1, H] of new tokens."""
        layout, own = inputs.get("attention_layout"), cast(Any, super())
        if layout is None:  # transformers' own generate
            return cast(Tensor, own.forward(hidden_states, **inputs))
        name = self.cache_name

        def compute(states: Tensor, state: LayerState | None) -> Tensor:
            return cast(Tensor, own.forward(states, **{name: state, "attention_mask": None}))

        cache: StateCache | None = inputs.get(name)
        if cache is not None:
            return (_decoded if cache.decodes else _prefilled)(hidden_states, cache, self.layer_idx, compute)
        if isinstance(layout, Packed):
            return _packed(hidden_states, layout, compute)
        what = "layers that keep a state are not split over devices: a sequence is computed on one"
        raise ModelError(Problem(what, fix="set policy.sequence_parallel=1", field="policy.sequence_parallel"))


def _packed(row: Tensor, layout: Packed, compute: Compute) -> Tensor:
    """Compute the sequences of a packed row, [1, N, H], apart."""
    outputs = []
    for bucket in layout.buckets:
        length = bucket.length if bucket.prefix is None else max(bucket.length, SHORTEST)
        places = bucket.places // bucket.length * length + bucket.places % bucket.length
        padded = row.new_zeros(bucket.rows * length, row.shape[-1]).index_copy(0, places, row[0, bucket.tokens])
        state = None if bucket.prefix is None else _behind_prompts(row, bucket, compute)
        output = compute(padded.view(bucket.rows, length, -1), state)
        outputs.append(output.flatten(0, 1)[places])
    return torch.cat(outputs)[layout.order][None]


def _behind_prompts(row: Tensor, bucket: Bucket, compute: Compute) -> LayerState:
    """Return the states that the prompts of a bucket leave, for each of its sequences."""
    prefix = bucket.prefix
    assert prefix is not None
    groups = len(prefix.visible)
    of_group = prefix.places // prefix.length
    states = []
    for group in range(groups):
        state = LayerState()
        compute(row[:, prefix.tokens[of_group == group]], state)
        states.append(state)
    joined = LayerState()
    for key, _ in states[0].items():
        joined.set(*key, torch.cat([dict(state.items())[key] for state in states]))
    return joined.rows(torch.arange(groups, device=row.device).repeat_interleave(bucket.rows // groups))


def _prefilled(row: Tensor, cache: StateCache, layer: int, compute: Compute) -> Tensor:
    """Compute the prompts of a prefill, [1, N, H], after the tokens that their slots hold, and store the new states."""
    outputs = []
    for start, end, slot, known in cache.parts:
        slots = torch.tensor([slot], device=row.device)
        state = cache.states.get("prompt", slots, layer) if known else LayerState()
        outputs.append(compute(row[:, start:end], state))
        cache.states.put("prompt", slots, layer, state)
    return torch.cat(outputs, dim=1)


def _decoded(rows: Tensor, cache: StateCache, layer: int, compute: Compute) -> Tensor:
    """Compute one new token per row, [rows, 1, H]; the first one of a response behind its prompt."""
    slots = torch.arange(len(rows), device=rows.device)
    of_prompts = cache.states.get("prompt", cache.prompt_slots, layer)
    state = cache.states.get("response", slots, layer).mixed(of_prompts, cache.places == 0)
    output = compute(rows, state)
    cache.states.put("response", slots, layer, state)
    return output
