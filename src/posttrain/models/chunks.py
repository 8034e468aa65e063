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
from collections.abc import Iterable, Iterator, Mapping
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


def write_chunks(folder: Path, rank: int, chunks: Iterable[Chunk]) -> None:
    """Write the chunks of process ``rank``, from 0; no file without chunks."""
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
    for number, held in enumerate(files, start=1):
        offsets = {chunk.name: {_OFFSETS: list(chunk.offsets)} for chunk in held}
        header = {_HEADER: json.dumps(offsets)}  # a single entry: safetensors would write several in any order
        tensors = {chunk.name: chunk.tensor.detach().cpu().contiguous() for chunk in held}
        save_file(tensors, folder / _FILE.format(rank=rank + 1, number=number, count=len(files)), header)


class ChunkedTensors(Mapping[str, Tensor]):
    """The whole tensors by name, sorted; each is assembled on access.

    Raises: ModelError when a folder cannot be read, or chunks of a tensor are missing.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._chunks: dict[str, list[_Place]] = defaultdict(list)
        try:
            for path in sorted(folder.glob("*.safetensors")):
                file = safe_open(path, framework="pt")
                for name, place in json.loads(file.metadata()[_HEADER]).items():
                    size = tuple(file.get_slice(name).get_shape())
                    self._chunks[name].append(_Place(file, tuple(place[_OFFSETS]), size))
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
        return tuple(slice(first, first + count) for first, count in zip(self.offsets, self.size, strict=True))


def _shape(places: Iterable[_Place]) -> tuple[int, ...]:
    """Return the shape of the whole tensor."""
    ends = [[edge.stop for edge in place.box] for place in places]
    return tuple(map(max, zip(*ends, strict=True)))
