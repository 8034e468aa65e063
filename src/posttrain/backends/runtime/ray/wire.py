"""Records as plain values: tensors travel as NumPy arrays, which Ray keeps once per node for all of its processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.records.unread_tensors import UnreadTensor


@dataclass(frozen=True, slots=True)
class PlainRecord:
    """A record with arrays for its tensors."""

    kind: type
    values: dict[str, Any]


def to_plain(value: Any) -> Any:
    """Arrays for tensors (which must be on the CPU), in records, mappings, lists and tuples; everything else as it is, unread
    tensors too."""
    return map_plain(value, lambda each: each if isinstance(each, UnreadTensor) else each.detach().numpy())


def map_plain(value: Any, plain_form: Callable[[Tensor], Any]) -> Any:
    """``to_plain`` with another form of tensors than arrays."""
    if isinstance(value, Tensor):
        return plain_form(value)
    if is_dataclass(value) and not isinstance(value, type):
        found = {field.name: getattr(value, field.name) for field in fields(value)}
        plain = {name: map_plain(each, plain_form) for name, each in found.items()}
        return PlainRecord(type(value), plain) if any(plain[name] is not found[name] for name in found) else value
    return _inside(value, lambda each: map_plain(each, plain_form))


def from_plain(value: Any) -> Any:
    """The way back. Arrays are copied: those that Ray hands out cannot be written to."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, PlainRecord):
        return value.kind(**{name: from_plain(each) for name, each in value.values.items()})
    return _inside(value, from_plain)


def _inside(value: Any, change: Any) -> Any:
    """``change`` applied to what a container holds; the container itself where nothing changes."""
    if isinstance(value, Mapping):
        changed: Any = {key: change(each) for key, each in value.items()}
        return changed if any(changed[key] is not value[key] for key in changed) else value
    # Names of all rows are many
    if type(value) in (list, tuple) and set(map(type, value)) != {str}:
        changed = type(value)(change(each) for each in value)
        return changed if any(new is not old for new, old in zip(changed, value, strict=True)) else value
    return value
