"""Images of a sample drawn in half blocks: every character of the terminal shows two pixels, one above the other."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from textual.content import Content

from posttrain.report.pictures import picture_files, read_picture

# Width of a picture in characters, each one pixel wide; a line is two pixels high.
MAX_COLUMNS = 48
MAX_PICTURES = 4  # per sample


def pictures(row: Mapping[str, Any], run_folder: Path) -> Content:
    """Draw the images of a sample that the run folder holds, each after its path."""
    parts: list[Content] = []
    files = picture_files(row)
    for file in files[:MAX_PICTURES]:
        content = read_picture(run_folder, file)
        parts.append(Content(f"{file}{'' if content else ', which is not there'}\n"))
        if content:
            parts.append(_drawn(content))
    if len(files) > MAX_PICTURES:
        parts.append(Content(f"and {len(files) - MAX_PICTURES} more\n"))
    return Content("").join(parts)


def _drawn(content: bytes) -> Content:
    try:
        with Image.open(BytesIO(content), formats=("PNG",)) as image:
            small = image.convert("RGB")
    except Exception as error:  # noqa: BLE001  # PIL's decoder may fail in any way on a damaged PNG
        return Content(f"it cannot be drawn: {type(error).__name__}\n")
    small.thumbnail((MAX_COLUMNS, MAX_COLUMNS))
    width, height = small.size
    lines = []
    for top in range(0, height, 2):
        cells = []
        for column in range(width):
            upper = small.getpixel((column, top))
            lower = small.getpixel((column, min(top + 1, height - 1)))
            cells.append(("▀", f"{_color(upper)} on {_color(lower)}"))
        lines.append(Content.assemble(*cells, "\n"))
    return Content("").join(lines)


def _color(pixel: Any) -> str:
    return f"rgb({pixel[0]},{pixel[1]},{pixel[2]})"
