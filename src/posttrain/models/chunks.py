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
from types import MappingProxyType
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


@dataclass(frozen=True, slots=True)
class StoredBox:
    """Place of a stored tensor in a tensor of the model: an expert's matrix in that of all experts, for example."""

    name: str  # of the tensor in the model
    offsets: tuple[int, ...]
    size: tuple[int, ...]  # in all dimensions of that tensor; the stored one lacks some of those of size 1


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

    Args: ``folder`` holds chunks; or, in the files ``whole`` of it, whole tensors. Of these ``boxes``, by the stored name, tells
        where each lies in the model's; one without a box of its shape is the whole tensor of its name.
    Raises: ModelError when it cannot be read, or chunks of a tensor are missing.
    """

    def __init__(
        self, folder: Path, *, whole: Sequence[Path] = (), boxes: Mapping[str, StoredBox] = MappingProxyType({})
    ):
        self._chunks: dict[str, list[_Place]] = defaultdict(list)
        try:
            for path in whole or sorted(folder.glob("*.safetensors")):
                file = safe_open(path, framework="pt")
                offsets = {} if whole else json.loads(file.metadata()[_HEADER])
                for name in file.keys():  # noqa: SIM118  # no mapping
                    size = tuple(file.get_slice(name).get_shape())
                    first = (0,) * len(size) if whole else tuple(offsets[name][_OFFSETS])
                    box = boxes.get(name)
                    if box is None or _longer(box.size) != _longer(size):
                        box = StoredBox(name, first, size)
                    self._chunks[box.name].append(_Place(file, name, size, box.offsets, box.size))
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ModelError(Problem(f"{path} cannot be read: {error}", fix="use another checkpoint")) from error
        self.shapes = {name: _shape(self._chunks[name]) for name in sorted(self._chunks)}
        for name, shape in self.shapes.items():
            if sum(math.prod(each.size) for each in self._chunks[name]) != math.prod(shape):
                what = f"{folder} does not hold all of {name}"
                raise ModelError(Problem(what, fix="copy the files of all processes there, or use another checkpoint"))

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shapes[name]
        places = self._chunks[name]
        if len(places) == 1:
            return places[0].read(places[0].box)
        return self.part(name, (0,) * len(shape), shape)

    def part(self, name: str, offsets: Sequence[int], size: Sequence[int]) -> Tensor:
        """Read ``size`` values of a tensor from ``offsets`` on, in each of its dimensions; of the files no others are read."""
        wanted = _box(offsets, size)
        found: Tensor | None = None
        for place in self._chunks[name]:
            shared = _shared(wanted, place.box)
            if any(edge.start >= edge.stop for edge in shared):
                continue
            values = place.read(shared)
            if found is None:
                found = torch.empty(tuple(size), dtype=values.dtype)
            found[_within(wanted, shared)] = values
        if found is None:  # nothing is wanted
            empty: Tensor = self._chunks[name][0].file.get_slice(self._chunks[name][0].name)[:0]
            found = torch.empty(tuple(size), dtype=empty.dtype)
        return found

    def __contains__(self, name: object) -> bool:  # without reading, as Mapping's would
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def shapes_of(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes by name, without putting chunks together."""
    if isinstance(tensors, ChunkedTensors):
        return tensors.shapes
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def part_of(tensors: Mapping[str, Tensor], name: str, offsets: Sequence[int], size: Sequence[int]) -> Tensor:
    """Return ``size`` values of a tensor from ``offsets`` on, in each of its dimensions; of files no others are read."""
    if isinstance(tensors, ChunkedTensors):
        return tensors.part(name, offsets, size)
    return tensors[name][_box(offsets, size)]


def stretch_of(tensors: Mapping[str, Tensor], name: str, first: int, count: int) -> Tensor:
    """Return ``count`` values of a tensor from number ``first`` on, [count], counted row after row. Of files the entries of its
    first dimension are read in which these lie."""
    if not isinstance(tensors, ChunkedTensors) or not tensors.shapes[name]:
        return tensors[name].reshape(-1)[first : first + count]
    rows, *others = tensors.shapes[name]
    row = math.prod(others)
    begin = first // row if row else 0
    end = min(rows, -(-(first + count) // row)) if row else 0
    read = tensors.part(name, (begin, *[0] * len(others)), (max(0, end - begin), *others))
    return read.reshape(-1)[first - begin * row :][:count]


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Place of a stored tensor in a whole one."""

    file: Any  # safetensors' handle, which reads on request
    name: str  # in the file
    stored: tuple[int, ...]  # its shape there
    offsets: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def box(self) -> tuple[slice, ...]:
        return _box(self.offsets, self.size)

    def read(self, part: tuple[slice, ...]) -> Tensor:
        """Read a part of the whole tensor that lies in this box and is not empty."""
        within = _within(self.box, part)
        held, edges = list(self.stored), []
        for length, edge in zip(self.size, within, strict=True):
            if held and held[0] == length:
                held.pop(0)
                edges.append(edge)
        size = [edge.stop - edge.start for edge in part]
        values: Tensor = self.file.get_slice(self.name)[tuple(edges)] if edges else self.file.get_tensor(self.name)
        return values.reshape(size)


def _box(offsets: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first, first + count) for first, count in zip(offsets, size, strict=True))


def _longer(size: Sequence[int]) -> list[int]:
    """Return a shape without its dimensions of size 1."""
    return [length for length in size if length != 1]


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
