"""Sharded tensors in files: each process writes its own chunks of them.

    FOLDER/shard-RRRRR-model-FFFFF-of-FFFFF.safetensors     by process R, from 1

A chunk is a box of a tensor, stored under the whole tensor's name. The file's header holds its offsets, in the layout of
torch.distributed.checkpoint, whose HuggingFaceStorageReader reads these folders as well. Unlike its writer, this one needs
no collective call. A process writes a second file when it holds two boxes of one tensor.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from posttrain.errors import ModelError, Problem

WEIGHT_CHUNKS = "weights"  # subfolder of a model's checkpoint
OPTIMIZER_CHUNKS = "optimizer"

_FILE = "shard-{rank:05}-model-{number:05}-of-{count:05}.safetensors"
_OFFSETS = "saved_offsets"
_HEADER = "DCP_SHARDING_INFO"


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A box of a tensor: the values starting at ``offsets`` in every dimension."""

    name: str  # of the whole tensor
    offsets: tuple[int, ...]
    tensor: Tensor


def whole_chunk(name: str, tensor: Tensor) -> Chunk:
    """Return a whole tensor as one chunk."""
    return Chunk(name, (0,) * tensor.dim(), tensor)


def write_chunks(folder: Path, rank: int, chunks: Iterable[Chunk]) -> list[Path]:
    """Write the chunks of process ``rank``, from 0; no file without chunks. Returns: the files."""
    files: list[list[Chunk]] = []
    seen: Counter[str] = Counter()
    for chunk in chunks:
        number = seen[chunk.name]
        seen[chunk.name] += 1
        if number == len(files):
            files.append([])
        files[number].append(chunk)
    if files:
        folder.mkdir(exist_ok=True)
    written = []
    for number, held in enumerate(files, start=1):
        offsets = {chunk.name: {_OFFSETS: list(chunk.offsets)} for chunk in held}
        header = {_HEADER: json.dumps(offsets)}  # a single entry: safetensors would write several in any order
        tensors = {chunk.name: chunk.tensor.detach().cpu().contiguous() for chunk in held}
        written.append(folder / _FILE.format(rank=rank + 1, number=number, count=len(files)))
        save_file(tensors, written[-1], header)
    return written


class ChunkedTensors(Mapping[str, Tensor]):
    """The whole tensors by name, sorted; each is assembled on access, and ``part`` reads a part of one.

    Args: ``folder`` holds chunks; or, in the files ``whole`` of it, whole tensors.
    Raises: ModelError when it cannot be read, or chunks of a tensor are missing.
    """

    def __init__(self, folder: Path, *, whole: Sequence[Path] = ()):
        self._chunks: dict[str, list[_Place]] = defaultdict(list)
        try:
            for path in whole or sorted(folder.glob("*.safetensors")):
                file = safe_open(path, framework="pt")
                offsets = {} if whole else json.loads(file.metadata()[_HEADER])
                for name in file.keys():  # noqa: SIM118  # no mapping
                    size = tuple(file.get_slice(name).get_shape())
                    first = (0,) * len(size) if whole else tuple(offsets[name][_OFFSETS])
                    self._chunks[name].append(_Place(file, first, size))
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ModelError(Problem(f"{path} cannot be read: {error}", fix="use another checkpoint")) from error
        self.shapes = {name: _shape(self._chunks[name]) for name in sorted(self._chunks)}
        for name, shape in self.shapes.items():
            if sum(math.prod(each.size) for each in self._chunks[name]) != math.prod(shape):
                what = f"{folder} does not hold all of {name}"
                raise ModelError(Problem(what, fix="copy the files of all processes there, or use another checkpoint"))

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shapes[name]
        first: Tensor = self._chunks[name][0].file.get_tensor(name)
        if first.shape == shape:
            return first
        whole = torch.empty(shape, dtype=first.dtype)
        for place in self._chunks[name]:
            whole[place.box] = place.file.get_tensor(name)
        return whole

    def part(self, name: str, offsets: Sequence[int], size: Sequence[int]) -> Tensor:
        """Read ``size`` values of a tensor from ``offsets`` on, in each of its dimensions; of the files no others are read."""
        wanted = _box(offsets, size)
        empty: Tensor = self._chunks[name][0].file.get_slice(name)[:0]
        found = torch.empty(tuple(size), dtype=empty.dtype)
        for place in self._chunks[name]:
            shared = _shared(wanted, place.box)
            if all(edge.start < edge.stop for edge in shared):
                found[_within(wanted, shared)] = place.file.get_slice(name)[_within(place.box, shared)]
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def shapes_of(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes by name, without putting chunks together."""
    if isinstance(tensors, ChunkedTensors):
        return tensors.shapes
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Place of a chunk."""

    file: Any  # safetensors' handle, which reads on request
    offsets: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def box(self) -> tuple[slice, ...]:
        return _box(self.offsets, self.size)


def _box(offsets: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first, first + count) for first, count in zip(offsets, size, strict=True))


def _shared(one: tuple[slice, ...], other: tuple[slice, ...]) -> tuple[slice, ...]:
    """Return what two boxes of a tensor have in common; an edge of it ends before its start where they have nothing."""
    return tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))


def _within(box: tuple[slice, ...], part: tuple[slice, ...]) -> tuple[slice, ...]:
    """Return a part of a box, counted from the box's own first value."""
    return tuple(slice(b.start - a.start, b.stop - a.start) for a, b in zip(box, part, strict=True))


def _shape(places: Iterable[_Place]) -> tuple[int, ...]:
    """Return the shape of the whole tensor."""
    ends = [[edge.stop for edge in place.box] for place in places]
    return tuple(map(max, zip(*ends, strict=True)))
