"""Pictures of grids, for vision models: a coloured cell per place, and a shape in it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Literal

WHITE, GREY, ICE = "#ffffff", "#404040", "#cfe8ff"
RED, GREEN, BLUE, BROWN = "#d02020", "#209040", "#2040d0", "#8a5a2b"
_LINE = "#b0b0b0"  # between cells


@dataclass(frozen=True, slots=True)
class Tile:
    """Appearance of a kind of cell: its ground and the shapes on it, from back to front, each with a colour."""

    ground: str = WHITE
    shapes: tuple[tuple[Literal["disc", "ring", "square"], str], ...] = ()


def drawn(kinds: Sequence[Sequence[str]], tiles: Mapping[str, Tile], pixels_per_cell: int) -> str:
    """Draw rows of kinds of cells. Returns: a PNG as a data URL, equal for equal grids."""
    from PIL import Image, ImageDraw  # a plan builds games and draws nothing

    side = pixels_per_cell
    image = Image.new("RGB", (side * len(kinds[0]), side * len(kinds)), WHITE)
    pen = ImageDraw.Draw(image)
    for row, line in enumerate(kinds):
        for column, kind in enumerate(line):
            left, top = column * side, row * side
            tile = tiles[kind]
            pen.rectangle((left, top, left + side - 1, top + side - 1), fill=tile.ground, outline=_LINE)
            for shape, colour in tile.shapes:
                _draw(pen, shape, colour, left, top, side)
    file = BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _draw(pen: object, shape: str, colour: str, left: int, top: int, side: int) -> None:
    """Draw one shape into a cell; a ring leaves room for what stands within it."""
    edge = side // 8 if shape == "ring" else side // 4
    box = (left + edge, top + edge, left + side - 1 - edge, top + side - 1 - edge)
    if shape == "square":
        pen.rectangle(box, fill=colour)  # type: ignore[attr-defined]
    elif shape == "disc":
        pen.ellipse(box, fill=colour)  # type: ignore[attr-defined]
    else:
        pen.ellipse(box, outline=colour, width=max(side // 8, 1))  # type: ignore[attr-defined]
