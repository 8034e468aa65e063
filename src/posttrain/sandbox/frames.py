"""Messages between a scorer and its warden: a header in JSON and pieces of bytes."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from typing import Any

_LENGTH = struct.Struct(">Q")


class Ended(Exception):
    """The other side is gone."""


def write(fd: int, header: dict[str, Any], pieces: Sequence[bytes] = ()) -> None:
    """Raises: BrokenPipeError when the other side is gone."""
    text = json.dumps({**header, "sizes": [len(piece) for piece in pieces]}).encode()
    for part in (_LENGTH.pack(len(text)) + text, *pieces):
        view = memoryview(part)
        while view:
            view = view[os.write(fd, view) :]


def read(fd: int) -> tuple[dict[str, Any], list[bytes]]:
    """Raises: Ended."""
    header = json.loads(_exactly(fd, *_LENGTH.unpack(_exactly(fd, _LENGTH.size))))
    return header, [_exactly(fd, size) for size in header["sizes"]]


def _exactly(fd: int, size: int) -> bytes:
    got = bytearray()
    while len(got) < size:
        piece = os.read(fd, min(size - len(got), 1 << 20))
        if not piece:
            raise Ended
        got += piece
    return bytes(got)
