"""Units of FSDP: modules whose parameters are gathered together, which determines communication and peak memory."""

from __future__ import annotations

from collections import Counter

from torch import nn
from transformers import PreTrainedModel

from posttrain.errors import ModelError, Problem, did_you_mean
from posttrain.models.value_head import HEADS
from posttrain.models.vision import has_vision
from posttrain.plan.engines.fsdp import FsdpSettings

CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # hold modules but have no forward pass, where gathering would begin


def units(model: PreTrainedModel, settings: FsdpSettings, role: str = "policy") -> list[nn.Module]:
    """Return the units of a model besides the model itself, which is the unit of the rest; inner before outer (as fully_shard
    requires), and otherwise in the order of the forward pass.

    Raises: ModelError when no module is of a class that the settings name.
    """
    if settings.one_unit:
        return []
    if settings.smallest_unit:
        return _of_size(model, settings.smallest_unit, _stay(model))[0]
    classes = settings.layers or tuple(model._no_split_modules or ())  # by transformers' default
    named = [(name, module) for name, module in model.named_modules() if type(module).__name__ in classes]
    missing = set(settings.layers or ()) - {type(module).__name__ for _, module in named}
    if missing:
        known = sorted({type(module).__name__ for module in model.modules()})
        wrong = sorted(missing)[0]
        raise ModelError(
            Problem(
                f"{type(model).__name__} has no layers of the class {wrong}",
                fix=did_you_mean(wrong, known) or f"use {', '.join(model._no_split_modules or known)}",
                field=f"{role}.engine_options.wrap_policy.transformer_layer_cls_to_wrap",
            )
        )
    return [module for _, module in sorted(named, key=lambda each: -each[0].count("."))]


def _stay(model: PreTrainedModel) -> set[int]:
    """Return modules that cannot be units: those that the loss reads outside of their forward pass, or with tied parameters, and
    the body of a vision-language model, whose parts are called one by one."""
    heads = [model.get_output_embeddings(), *(getattr(model, name, None) for name in HEADS)]
    if has_vision(model.config):
        heads.append(model.base_model)
    held = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    sharing = [
        module for module in model.modules() if any(held[id(weight)] > 1 for weight in module.parameters(recurse=False))
    ]
    return {id(model), *(id(module) for module in [*heads, *sharing] if module is not None)}


def _of_size(module: nn.Module, smallest: int, stay: set[int]) -> tuple[list[nn.Module], int]:
    """Return units at and below a module, and the number of parameters in none. A unit has at least ``smallest`` of its own."""
    found: list[nn.Module] = []
    left = sum(weight.numel() for weight in module.parameters(recurse=False))
    if id(module) in stay and not list(module.children()):
        return [], 0  # counted with the model, which holds them
    for child in module.children():
        below, rest = _of_size(child, smallest, stay)
        found += below
        left += rest
    if left >= smallest and not isinstance(module, CONTAINERS) and id(module) not in stay:
        return [*found, module], 0
    return found, left
