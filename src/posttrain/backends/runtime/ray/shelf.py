"""The tensors of a step in Ray's object store, each put there once, and the records of which they are parts.

Ray hands a worker the arrays without a copy, from memory that the processes of a node share: a rank copies the rows that it
computes, and no others. A mini-batch of neighbouring rows is a range of the arrays of its batch, and puts nothing. What workers
have put there (records.stored_tensors) is passed on as it is, and so are masks and what is
equal for all tokens of a response, which are a number and a few spans per row (records.span_tensors).
"""

from __future__ import annotations

import math
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from posttrain.backends.runtime.ray.cluster import RayArray
from posttrain.backends.runtime.ray.wire import PlainRecord, map_plain
from posttrain.records.span_tensors import SpanTensor, runs_of
from posttrain.records.stored_rows import HeldArray, StoredArray
from posttrain.records.unread_tensors import UnreadTensor

SMALLEST = 1 << 16  # bytes; smaller arrays travel with their record
# Of a step's token: ids and versions 8 each; log-probs of sampler, policy and reference, advantages, values and returns 4 each;
# two masks; and what the ranks answer
BYTES_PER_TOKEN = 48
# Of a token that is sampled ahead of its step: id and log-prob in 4 bytes each, once as reported and once as ended
AHEAD_BYTES_PER_TOKEN = 16
_SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True, slots=True)
class Range:
    """A tensor in one of the arrays beside a record, which are flat."""

    array: int
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shelved:
    """A record in the store."""

    record: Any  # a promise of the record, with a Range in the place of every large tensor
    arrays: tuple[Any, ...]  # promises


class Shelf:
    """The tensors that lie in the store. A tensor leaves it with its last reference in this process; an edited one is put again.

    Args: put gives a promise of a value; ``kept`` makes a stored array of the promise of an array.
    """

    def __init__(self, put: Callable[[Any], Any], kept: Callable[[Any], StoredArray] = RayArray):
        self._put, self._kept = put, kept
        self._forms: Any = WeakTensorKeyDictionary()
        self._arrays: WeakKeyDictionary[StoredArray, StoredArray] = WeakKeyDictionary()

    def place(self, value: Any) -> Shelved:
        """Put a record, a mapping or a sequence of them into the store, but for the tensors that are there."""
        arrays: list[Any] = []
        numbers: dict[int, int] = {}  # by id of the tensor

        def plain(tensor: Tensor) -> Any:
            if isinstance(tensor, UnreadTensor):
                return tensor.with_arrays(self._outside)
            if tensor.nbytes < SMALLEST:
                return tensor.detach().numpy()
            whole, start = _source(tensor)
            form = self._form(whole)
            if isinstance(form, SpanTensor) and not _are_rows(tensor, whole, start):
                whole, start, form = tensor, 0, self._form(tensor)
            if isinstance(form, SpanTensor):
                first = start // form.shape[1]
                return form.rows(slice(first, first + len(tensor))).with_arrays(self._outside)
            if id(whole) not in numbers:
                numbers[id(whole)] = len(arrays)
                arrays.append(form)
            return Range(numbers[id(whole)], start, tuple(tensor.shape))

        record = map_plain(value, plain)
        return Shelved(self._put(record), tuple(arrays))

    def _form(self, tensor: Tensor) -> Any:
        """The tensor as runs, where it is nothing else; a promise of its values otherwise."""
        version, form = self._forms.get(tensor, (None, None))
        if version != tensor._version:
            form = runs_of(tensor) if tensor.ndim == 2 else None
            form = self._put(tensor.detach().reshape(-1).numpy()) if form is None else form
            self._forms[tensor] = tensor._version, form
        return form

    def _outside(self, array: StoredArray) -> StoredArray:
        """The array where workers can read it: a large one of this process is put into the store."""
        if not isinstance(array, HeldArray) or array.read().nbytes < SMALLEST:
            return array
        if array not in self._arrays:
            self._arrays[array] = self._kept(self._put(array.read()))
        return self._arrays[array]


def _are_rows(tensor: Tensor, whole: Tensor, start: int) -> bool:
    """Tell whether a stretch of a tensor, from its value ``start`` on, is whole rows of it."""
    return tensor.shape[1:] == whole.shape[1:] and start % whole.shape[1] == 0


def _source(tensor: Tensor) -> tuple[Tensor, int]:
    """The tensor that this one is a stretch of, and where it starts there; itself and 0 where it is none."""
    whole = tensor._base
    if whole is None or not whole.is_contiguous() or not tensor.is_contiguous() or whole.dtype != tensor.dtype:
        return tensor, 0
    return whole, int(tensor.storage_offset() - whole.storage_offset())


def step_bytes(sequences: int, tokens: int, steps_ahead: float = 0.0) -> int:
    """Estimate the room for a step of so many sequences of at most so many tokens, prompt and response, and for responses of so
    many steps that are sampled ahead: at most half of the shared memory that is free here, beyond which Ray moves arrays to the
    disk."""
    free = shutil.disk_usage(_SHARED_MEMORY).free if os.path.isdir(_SHARED_MEMORY) else 0
    each = BYTES_PER_TOKEN + AHEAD_BYTES_PER_TOKEN * steps_ahead
    return min(math.ceil(each * sequences * tokens), free // 2)


def taken_down(record: Any, arrays: Sequence[np.ndarray[Any, Any]]) -> Any:
    """The record in a worker. Its large tensors are memory that others read, too: they must not be edited."""

    def tensor(value: Any) -> Any:
        if isinstance(value, Range):
            stretch = arrays[value.array][value.start : value.start + math.prod(value.shape)]
            return _shared(stretch.reshape(value.shape))
        return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value

    return _restored(record, tensor)


def _restored(value: Any, tensor: Callable[[Any], Any]) -> Any:
    if isinstance(value, PlainRecord):
        return value.kind(**{name: _restored(each, tensor) for name, each in value.values.items()})
    if isinstance(value, dict):
        return {key: _restored(each, tensor) for key, each in value.items()}
    if type(value) in (list, tuple) and set(map(type, value)) != {str}:
        return type(value)(_restored(each, tensor) for each in value)
    return tensor(value)


def _shared(array: np.ndarray[Any, Any]) -> Tensor:
    with warnings.catch_warnings():  # torch cannot mark a tensor as read-only
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
