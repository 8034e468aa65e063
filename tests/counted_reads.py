"""How many bytes of saved tensors are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from safetensors import safe_open
from torch import Tensor


class Reads:
    """What has been read so far."""

    bytes = 0

    def noted(self, tensor: Tensor) -> Tensor:
        self.bytes += tensor.nbytes
        return tensor


class CountedFile:
    """A file of safetensors whose reads are noted."""

    def __init__(self, file: Any, reads: Reads):
        self._file, self._reads = file, reads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_tensor(self, name: str) -> Tensor:
        return self._reads.noted(self._file.get_tensor(name))

    def get_slice(self, name: str) -> CountedSlice:
        return CountedSlice(self._file.get_slice(name), self._reads)


class CountedSlice:
    def __init__(self, slice: Any, reads: Reads):
        self._slice, self._reads = slice, reads

    def get_shape(self) -> list[int]:
        return self._slice.get_shape()

    def __getitem__(self, place: Any) -> Tensor:
        return self._reads.noted(self._slice[place])


@contextmanager
def counted_reads() -> Iterator[Reads]:
    """Count what is read of the files that are opened inside the ``with`` block, there and later."""
    reads = Reads()
    with patch("posttrain.models.chunks.safe_open", lambda *how, **more: CountedFile(safe_open(*how, **more), reads)):
        yield reads
