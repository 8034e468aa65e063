"""Checks of all rows of a dataset file, for training, fine-tuning or evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

from posttrain.config.data import DataConfig
from posttrain.config.evaluate import EvaluateDataConfig
from posttrain.config.sft import SftDataConfig
from posttrain.data.images import ImageRules
from posttrain.data.readers import DatasetRow, checked_rows
from posttrain.data.record_files import first_record, read_records
from posttrain.data.sft_rows import SftRow, choose_columns, row_of
from posttrain.errors import DataError, Problem
from posttrain.rewards.sources import find_route

Purpose = Literal["rl", "sft", "evaluate"]
PURPOSES: tuple[Purpose, ...] = ("rl", "sft", "evaluate")
MAX_SHOWN = 20
FIRST_ROWS = 64  # rows whose images are checked before a run


@dataclass(slots=True)
class Checked:
    """The result of a check. ``problems`` holds the first MAX_SHOWN, ``bad`` counts all."""

    rows: int = 0
    bad: int = 0
    problems: list[Problem] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)  # rows by data source; empty for sft
    responses: int = 0
    # Images by width and height, pixels.
    image_sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    most_images: int = 0  # in one row

    def add(self, problem: Problem) -> None:
        self.bad += 1
        if len(self.problems) < MAX_SHOWN:
            self.problems.append(problem)

    def count_images(self, row: DatasetRow) -> None:
        """Count the images of a row."""
        self.image_sizes.update((image.width, image.height) for image in row.images)
        self.most_images = max(self.most_images, len(row.images))

    def images_text(self) -> str:
        """Describe the number and sizes of the images in a line; "" without images."""
        sizes = self.image_sizes
        if not sizes:
            return ""
        largest, smallest = (choose(sizes, key=lambda size: size[0] * size[1]) for choose in (max, min))
        pixels = f"{smallest[0]} x {smallest[1]}"
        if largest != smallest:
            pixels += f" to {largest[0]} x {largest[1]}"
        return f"{sizes.total()} images of {pixels} pixels, at most {self.most_images} in a row"

    def unscored(self) -> list[str]:
        """Return the data sources without a built-in scorer."""
        return [source for source in sorted(self.sources) if find_route(source, {}) is None]


def check_dataset(path: str, purpose: Purpose) -> Checked:
    """Check every row of a file that has the usual columns of a purpose. Invalid content raises nothing."""
    found = Checked()
    _, unreadable = first_record(path, "")
    if unreadable:
        found.problems, found.bad = unreadable, len(unreadable)
        return found
    rows: Iterator[DatasetRow | SftRow | Problem] = _sft_rows(path) if purpose == "sft" else _rows(path, purpose)
    try:
        for row in rows:
            found.rows += 1
            if isinstance(row, Problem):
                found.add(row)
            elif isinstance(row, DatasetRow):
                found.sources[row.data_source] += 1
                found.responses += len(row.responses)
                found.count_images(row)
    except DataError as error:
        for problem in error.problems:
            found.add(problem)
    return found


def first_images(files: Sequence[str], data: DataConfig, limit: int = FIRST_ROWS) -> Checked:
    """Check the first ``limit`` rows of the first file with images; of the last file when none has images. Invalid rows raise
    nothing.

    Raises: DataError when a file cannot be read.
    """
    found = Checked()
    for path in files:
        found = Checked()
        for row in islice(checked_rows(path, data, images=ImageRules.of(data)), limit):
            found.rows += 1
            if isinstance(row, Problem):
                found.add(row)
            else:
                found.count_images(row)
        if found.image_sizes or found.bad:
            break
    return found


def _rows(path: str, purpose: Purpose) -> Iterator[DatasetRow | Problem]:
    if purpose == "rl":
        config = DataConfig(train_files=[path])
        return checked_rows(path, config, images=ImageRules.of(config))
    data = EvaluateDataConfig(files=[path])
    return checked_rows(path, data, responses=data.response_column)


def _sft_rows(path: str) -> Iterator[SftRow | Problem]:
    data, columns, file = SftDataConfig(train_files=[path]), None, Path(path).expanduser()
    for number, record in enumerate(read_records(file)):
        columns = columns or choose_columns(record, data, file.name)
        yield row_of(record, number, file.name, columns, data)
