"""A generated task for vision models: count the coloured shapes of some kind on a white square.

Shapes occupy the cells of a grid, shifted inside them, so they never overlap. The answer is drawn first, uniformly, so that
guessing a common number does not pay.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

from posttrain.errors import ConfigError, DataError, Problem
from posttrain.libraries.folders import make_folder

KINDS = ("circle", "square", "triangle", "diamond")
COLORS = {
    "red": (214, 39, 40),
    "blue": (31, 119, 180),
    "green": (44, 160, 44),
    "orange": (255, 127, 14),
    "purple": (148, 103, 189),
    "black": (20, 20, 20),
}
SOURCE = "posttrain/count_shapes"
SMALLEST = 6  # pixels per side of a cell, for a shape of four

SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "images": pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()})),
        "ability": pa.string(),
        "reward_model": pa.struct({"style": pa.string(), "ground_truth": pa.string()}),
        "extra_info": pa.struct(
            {"split": pa.string(), "index": pa.int64(), "kind": pa.string(), "color": pa.string(), "shapes": pa.int64()}
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difficulty:
    """Difficulty of the counting: the number of shapes, kinds, colours and pixels."""

    max_shapes: int = 5  # in a picture, and the largest answer
    kinds: int = 2  # the first of KINDS
    colors: int = 1  # the first of COLORS
    size: int = 56  # pixels per side

    def problems(self) -> list[Problem]:
        """Return the problems of settings that cannot be drawn."""
        limits = {"max_shapes": (1, 36), "kinds": (1, len(KINDS)), "colors": (1, len(COLORS)), "size": (8, 1024)}
        found = [
            Problem(f"{name} is {value}", fix=f"use {low} to {high}")
            for name, (low, high) in limits.items()
            if not low <= (value := getattr(self, name)) <= high
        ]
        if not found and self.size // _cells(self.max_shapes) < SMALLEST:
            what = f"{self.max_shapes} shapes do not fit on {self.size} x {self.size} pixels"
            found.append(Problem(what, fix=f"use a size of at least {SMALLEST * _cells(self.max_shapes)}"))
        return found


@dataclass(frozen=True, slots=True)
class Shape:
    kind: str
    color: str
    left: int  # pixels, of the bounding box
    top: int
    side: int


@dataclass(frozen=True, slots=True)
class Picture:
    """One task; equal pictures show and ask the same."""

    shapes: tuple[Shape, ...]
    kind: str | None  # to be counted; None: any
    color: str | None

    @property
    def answer(self) -> int:
        return sum(self.kind in (None, shape.kind) and self.color in (None, shape.color) for shape in self.shapes)

    @property
    def question(self) -> str:
        words = [self.color, f"{self.kind or 'shape'}s"]
        return f"How many {' '.join(word for word in words if word)} are there?"


def write_shapes(
    folder: Path,
    *,
    train_rows: int,
    validation_rows: int,
    seed: int,
    difficulty: Difficulty,
    instruction: str = "Answer with a number.",
) -> tuple[Path, Path]:
    """Write train.parquet and validation.parquet into ``folder`` (created if absent; old files are replaced).

    No picture occurs twice, neither in one file nor across both; the validation rows are drawn first and stay the same when
    more training rows are requested. The same arguments give the same rows.

    Returns: the two paths, training first.
    Raises: ConfigError for settings that cannot be drawn; DataError when there are too few different pictures.
    """
    problems = difficulty.problems()
    problems += [
        Problem(f"{name} is {rows}", fix="use at least 1")
        for name, rows in (("train_rows", train_rows), ("validation_rows", validation_rows))
        if rows < 1
    ]
    if problems:
        raise ConfigError(problems)
    pictures = _distinct(train_rows + validation_rows, seed, difficulty)
    splits = {"train": pictures[validation_rows:], "validation": pictures[:validation_rows]}
    make_folder(folder)
    for split, chosen in splits.items():
        rows = [_row(picture, split, index, difficulty.size, instruction) for index, picture in enumerate(chosen)]
        beside = folder / f".{split}.parquet.{os.getpid()}"
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), beside)
        beside.replace(folder / f"{split}.parquet")
    return folder / "train.parquet", folder / "validation.parquet"


def draw(picture: Picture, size: int) -> bytes:
    """Draw a PNG file of ``size`` x ``size`` pixels, without anti-aliasing: the same pixels on every machine."""
    image = Image.new("RGB", (size, size), "white")
    pen = ImageDraw.Draw(image)
    for shape in picture.shapes:
        left, top, right, bottom = shape.left, shape.top, shape.left + shape.side - 1, shape.top + shape.side - 1
        middle, half = (left + right) // 2, (top + bottom) // 2
        color = COLORS[shape.color]
        if shape.kind == "circle":
            pen.ellipse((left, top, right, bottom), fill=color)
        elif shape.kind == "square":
            pen.rectangle((left, top, right, bottom), fill=color)
        elif shape.kind == "triangle":
            pen.polygon([(left, bottom), (middle, top), (right, bottom)], fill=color)
        else:
            pen.polygon([(left, half), (middle, top), (right, half), (middle, bottom)], fill=color)
    file = BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def pictures(seed: int, difficulty: Difficulty) -> Iterator[Picture]:
    """Yield endless tasks, some of them equal."""
    chance = random.Random(seed)
    kinds, colors = KINDS[: difficulty.kinds], tuple(COLORS)[: difficulty.colors]
    while True:
        kind = chance.choice(kinds) if len(kinds) > 1 else None
        color = chance.choice(colors) if len(colors) > 1 and (kind is None or chance.random() < 0.5) else None
        asked = [(each, shade) for each in kinds for shade in colors if kind in (None, each) and color in (None, shade)]
        others = [(each, shade) for each in kinds for shade in colors if (each, shade) not in asked]
        answer = chance.randint(0 if others else 1, difficulty.max_shapes)
        room = difficulty.max_shapes - answer if others else 0
        rest = chance.randint(0 if answer else 1, room) if room else 0
        chosen = [chance.choice(asked) for _ in range(answer)] + [chance.choice(others) for _ in range(rest)]
        yield Picture(_placed(chosen, difficulty, chance), kind, color)


def _placed(chosen: Sequence[tuple[str, str]], difficulty: Difficulty, chance: random.Random) -> tuple[Shape, ...]:
    """Place each shape in its own cell, at a size that fills at least half of it, with a free pixel on every side."""
    per_side = _cells(difficulty.max_shapes)
    cell = difficulty.size // per_side
    shapes = []
    for (kind, color), place in zip(chosen, chance.sample(range(per_side**2), len(chosen)), strict=True):
        side = chance.randint(max(cell // 2, SMALLEST - 2), cell - 2)
        left, top = (chance.randint(1, cell - side - 1) for _ in range(2))
        shapes.append(Shape(kind, color, place % per_side * cell + left, place // per_side * cell + top, side))
    return tuple(shapes)


def _cells(shapes: int) -> int:
    """Return the cells per side of the smallest square grid with at least this many cells."""
    return math.ceil(math.sqrt(shapes))


def _distinct(count: int, seed: int, difficulty: Difficulty) -> list[Picture]:
    """Return the first ``count`` different tasks; stops after a thousand draws in a row without a new one."""
    found: dict[Picture, None] = {}
    without_new = 0
    for picture in pictures(seed, difficulty):
        without_new = without_new + 1 if picture in found else 0
        found[picture] = None
        if len(found) == count:
            break
        if without_new == 1000:
            what = f"there are hardly more than {len(found)} such pictures; {count} are requested"
            raise DataError(Problem(what, fix="ask for fewer rows, or for more shapes, kinds, colors or pixels"))
    return list(found)


def _row(picture: Picture, split: str, index: int, size: int, instruction: str) -> dict[str, object]:
    return {
        "data_source": SOURCE,
        "prompt": [{"role": "user", "content": f"<image>{picture.question} {instruction}".strip()}],
        "images": [{"bytes": draw(picture, size), "path": None}],
        "ability": "counting",
        "reward_model": {"style": "rule", "ground_truth": str(picture.answer)},
        "extra_info": {
            "split": split,
            "index": index,
            "kind": picture.kind,
            "color": picture.color,
            "shapes": len(picture.shapes),
        },
    }
