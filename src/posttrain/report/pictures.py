"""Images of samples as data URLs. A run folder may be untrusted: only small PNG files with the names that training writes are
read, and a browser renders such a URL as PNG only."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = re.compile(r"samples/images/[0-9a-f]{32}\.png")
MAX_SIDE = 1024  # pixels
MAX_BYTES = 1_000_000  # per file
_START = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"


def picture_files(row: Mapping[str, Any]) -> list[str]:
    """Return the files, within the run folder, that a sample names as its images; other values are ignored."""
    images = row.get("images")
    found = [image.get("file") for image in images if isinstance(image, Mapping)] if isinstance(images, list) else []
    return [file for file in found if isinstance(file, str) and NAME.fullmatch(file)]


def read_picture(run_folder: Path, file: str) -> bytes | None:
    """Read a PNG file that ``picture_files`` returned; None when it is missing or not a PNG."""
    path = run_folder / file
    if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_BYTES:
        return None
    content = path.read_bytes()
    sides = [int.from_bytes(content[start : start + 4], "big") for start in (16, 20)]
    return content if content.startswith(_START) and all(0 < side <= MAX_SIDE for side in sides) else None


def data_url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode('ascii')}"
