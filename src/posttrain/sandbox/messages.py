"""Messages between a scorer and its warden: a frame with a header in JSON, then a frame for each piece of bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from posttrain.processes.frames import MOST_BYTES, read_frame, write_frame


def write_message(fd: int, header: dict[str, Any], pieces: Sequence[bytes] = ()) -> None:
    """Raises: PipeClosed when the other side is gone."""
    write_frame(fd, json.dumps({**header, "pieces": len(pieces)}).encode())
    for piece in pieces:
        write_frame(fd, piece)


def read_message(fd: int) -> tuple[dict[str, Any], list[bytes]]:
    """Raises: PipeClosed."""
    header = json.loads(read_frame(fd, MOST_BYTES))
    return header, [read_frame(fd, MOST_BYTES) for _ in range(header["pieces"])]
