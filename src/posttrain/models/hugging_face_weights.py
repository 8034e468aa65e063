"""A model's weights as a Hugging Face checkpoint would hold them: what samplers that load such checkpoints are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

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
    """Names and tensors, in the dtype that the model has them in, or in another; an adapter is merged into the layers it belongs
    to. A tensor that two names share (tied embeddings) comes once, under the first: loaders tie it again. Layers that
    transformers keeps fused in memory are split as in its files.

    Args: ``whole`` makes all of a tensor from the part that is here, together with the other processes, which make the same
        calls; without ``keep`` this process takes part in that and gets nothing. ``gathered``: whole tensors by the model's own
        names, of a model that is a shell and has none.
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


def _whole_state(model: PreTrainedModel, whole: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    owners = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    seen: set[int | str] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():  # parameters, which know where their parts are
        owner = owners.get(name, name)
        if owner in seen:
            continue
        seen.add(owner)
        yield name, whole(tensor).detach()
