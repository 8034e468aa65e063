"""A model's weights in the form of a Hugging Face checkpoint, for samplers that load such checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, revert_weight_conversion

from posttrain.models.chunks import StoredBox
from posttrain.models.lora import is_adapted, merged_weights

_PLACES = (Concatenate, MergeModulelist)  # what puts tensors beside one another and changes nothing in them


@torch.no_grad()
def hugging_face_weights(
    model: PreTrainedModel,
    whole: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    *,
    keep: bool = True,
    dtype: torch.dtype | None = None,
    gathered: Iterable[tuple[str, Tensor]] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors, in the model's dtype or another; an adapter is merged into its layers. A tensor shared by two
    names (tied embeddings) comes once, under the first: loaders tie it again. Layers that transformers keeps fused in memory are
    split as in its files.

    Args: ``whole`` gathers a tensor from its local part, together with the other processes, which make the same calls; without
        ``keep`` this process takes part in that but yields nothing. ``gathered``: whole tensors by the model's own names, for a
        model without weights of its own.
    """
    state = {}
    for name, tensor in _whole_state(model, whole) if gathered is None else gathered:
        if keep:
            state[name] = tensor
    if not keep:
        return
    if is_adapted(model):
        state = merged_weights(model, state)
    if dtype is not None:
        state = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    yield from revert_weight_conversion(model, state).items()


def stored_boxes(
    model: PreTrainedModel, shape: Callable[[Tensor], torch.Size] = lambda tensor: tensor.shape
) -> dict[str, StoredBox] | None:
    """Return the place in the model of every tensor of its files, by its name there: transformers may call it otherwise, and
    keeps in one tensor what its files have in several, such as the experts of a layer. None where it computes with them besides.

    Args: shape of the whole tensor of a parameter.
    """
    # Those with which it was loaded, and with which it is saved
    conversions = getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model)
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    if not all(isinstance(each, _PLACES) for converter in converters for each in converter.operations):
        return None
    # Tensors without memory are split as for a file; where a part of one begins, and its strides, tell its place.
    whole = {
        name: torch.empty(shape(tensor), device="meta") for name, tensor in model.state_dict(keep_vars=True).items()
    }
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in whole.items()}
    with _WithoutCopies():
        stored = revert_weight_conversion(model, whole)
    found = {name: owners[tensor.untyped_storage()._cdata] for name, tensor in stored.items()}
    return {name: _box(owner, whole[owner], stored[name]) for name, owner in found.items()}


class _WithoutCopies(TorchFunctionMode):
    """Have parts of tensors remain views: ``contiguous`` is a no-op inside the ``with`` block."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if function is Tensor.contiguous else function(*args, **kwargs or {})


def _box(name: str, whole: Tensor, part: Tensor) -> StoredBox:
    """Return the place of a view in a contiguous tensor. A dimension of the tensor that the view lacks has one entry there."""
    lengths = {stride: length for stride, length in zip(part.stride(), part.shape, strict=True) if length > 1}
    offsets, rest = [], part.storage_offset()
    for stride in whole.stride():
        offsets.append(rest // stride)
        rest %= stride
    size = tuple(
        lengths.get(stride, 1) if length > 1 else 1 for stride, length in zip(whole.stride(), whole.shape, strict=True)
    )
    return StoredBox(name, tuple(offsets), size)


def _whole_state(model: PreTrainedModel, whole: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    owners = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    seen: set[int | str] = set()
    # Parameters, which know the layout of their shards.
    for name, tensor in model.state_dict(keep_vars=True).items():
        owner = owners.get(name, name)
        if owner in seen:
            continue
        seen.add(owner)
        yield name, whole(tensor).detach()
