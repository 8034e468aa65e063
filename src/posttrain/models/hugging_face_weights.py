"""A model's weights in the form of a Hugging Face checkpoint, for samplers that load such checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from posttrain.models.lora import is_adapted, merged_weights


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


def is_stored_as_it_is(model: PreTrainedModel) -> bool:
    """Return True where files of the model hold its parameters themselves, under their own or other names; False where
    transformers fuses or splits them."""
    return not any(isinstance(each, WeightConverter) for each in get_model_conversion_mapping(model))


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
