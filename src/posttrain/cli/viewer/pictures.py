"""A sample's images drawn with half blocks: two pixels, one above the other, in every character of the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from textual.content import Content

from posttrain.report.pictures import picture_files, read_picture

MAX_COLUMNS = 48  # characters of a picture, each a pixel wide; half as many lines are two pixels high
MAX_PICTURES = 4  # of a sample


def pictures(row: Mapping[str, Any], run_folder: Path) -> Content:
    """The images of a sample that the run folder holds, and where they are."""
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
    except Exception as error:  # noqa: BLE001  # a file that says PNG and is none may fail in any way in PIL's decoder
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
