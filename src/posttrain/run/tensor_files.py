"""A safetensors file whose rows are written by the processes that hold them, each into its own place of the file.

Under Ray the tensors of a step lie in the object store, and the driver has only their places. It lays the file out from names,
dtypes and shapes, and every rank writes its share of the rows there, a few at a time. So neither the driver nor a rank holds a
whole tensor, and a step's file costs the driver one call of each rank. The bytes are the same however rows are shared out.

    8 bytes with the length of the header | header as JSON | values of all tensors, one after another
Source: the safetensors format, https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import RunStopped
from posttrain.interfaces.row_work import RowWork
from posttrain.records.unread_tensors import UnreadTensor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
CHUNK_BYTES = 1 << 24  # of a tensor that are read and written together, about


def write_tensors(path: Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str], over_rows: RowWork) -> None:
    """Write a safetensors file, whole or not at all. Args: texts, its metadata; over_rows, see interfaces.row_work.

    Raises: RunStopped naming the file when it cannot be written, here or where the rows are.
    """
    # Widest values first, so that each lies at a multiple of its width
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(sorted(texts.items()))} if texts else {}
    starts, end = dict[str, int](), 0
    for name in names:
        each = tensors[name]
        starts[name], end = end, end + each.numel() * each.dtype.itemsize
        header[name] = {
            "dtype": DTYPES[each.dtype],
            "shape": list(each.shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    # A tensor with several names is read once
    places: dict[int, tuple[Tensor, list[int]]] = {}
    for name in names:
        places.setdefault(id(tensors[name]), (tensors[name], []))[1].append(first + starts[name])
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp").resolve()
    try:
        with open(beside, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(first + end)
    except OSError as error:
        raise RunStopped(f"{path}: {error}") from error
    unread: dict[int, list[tuple[Tensor, list[int]]]] = {}  # by the number of rows
    for tensor, at in places.values():
        if isinstance(tensor, UnreadTensor):
            unread.setdefault(len(tensor), []).append((tensor, at))
        else:
            _write_rows(beside, [at], torch.zeros(1, dtype=torch.int64), tensor.detach().cpu())
    for rows, held in unread.items():
        if rows:
            over_rows(
                partial(_write_rows, beside, [at for _, at in held]), torch.arange(rows), *(one for one, _ in held)
            )
    os.replace(beside, path)


def _write_rows(path: Path, starts: Sequence[Sequence[int]], numbers: Tensor, *tensors: Tensor) -> Tensor:
    """Write neighbouring rows of tensors into their places.

    Args: starts, where the first row of each tensor lies in the file, in bytes, once for each of its names; numbers [n] of the
        rows, of which the first is read. Returns: [n, 1], nothing to know.
    Raises: RunStopped naming the file.
    """
    try:
        with open(path, "r+b", buffering=0) as file:
            for tensor, places in zip(tensors, starts, strict=True):
                _write(file.fileno(), tensor, int(numbers[0]), places)
    except OSError as error:
        raise RunStopped(f"{path.with_suffix('.safetensors')}: {error}") from error
    return torch.zeros(len(numbers), 1, dtype=torch.bool)


def _write(file: int, tensor: Tensor, first: int, places: Sequence[int]) -> None:
    """Write rows, a few at a time. Args: first, the number of the first one; places of the tensor's row 0, in bytes."""
    if tensor.numel() == 0:
        return
    of_row = tensor.numel() // len(tensor) * tensor.dtype.itemsize if tensor.ndim else tensor.dtype.itemsize
    together = max(1, CHUNK_BYTES // of_row)
    for start in range(0, len(tensor) if tensor.ndim else 1, together):
        some = tensor[start : start + together] if tensor.ndim else tensor
        full = some.read() if isinstance(some, UnreadTensor) else some
        values = full.contiguous().reshape(-1).view(torch.uint8).numpy().data
        for place in places:
            _write_all(file, values, place + (first + start) * of_row)


def _write_all(file: int, values: memoryview, place: int) -> None:
    written = 0
    while written < len(values):
        written += os.pwrite(file, values[written:], place + written)
