"""Checks of all rows of a dataset file, for training, fine-tuning or evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from posttrain.config.data import DataConfig
from posttrain.config.evaluate import EvaluateDataConfig
from posttrain.config.sft import SftDataConfig
from posttrain.data.images import ImageRules
from posttrain.data.readers import MAX_LISTED, DatasetRow, checked_rows
from posttrain.data.record_files import count_rows, first_record, kind_of, read_records
from posttrain.data.sft_rows import SftRow, choose_columns, row_of
from posttrain.data.templated import marker_in, templated_problem
from posttrain.errors import DataError, Problem
from posttrain.rewards.sources import find_route

Purposed = DataConfig | SftDataConfig | EvaluateDataConfig
# The use of a file -> the data section of its command, and the key that names the files there.
PURPOSES: dict[str, tuple[type[Purposed], str]] = {
    "rl": (DataConfig, "train_files"),
    "sft": (SftDataConfig, "train_files"),
    "evaluate": (EvaluateDataConfig, "files"),
}
MAX_SHOWN = 20
CHECKED_ROWS = 20_000  # of a parquet file, before a run; opening the dataset checks all
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


def check_dataset(path: str, purpose: str, data: Purposed | None = None) -> Checked:
    """Check every row of a file for one of PURPOSES. Invalid content raises nothing.

    Args: ``data`` names the columns; by default the file has the usual ones.
    """
    section, names_files = PURPOSES[purpose]
    data = data or section.model_validate({names_files: [path]})
    found = Checked()
    _, unreadable = first_record(path, "")
    if unreadable:
        found.problems, found.bad = unreadable, len(unreadable)
        return found
    try:
        for row in _rows(path, data):
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


def first_images(
    files: Sequence[str], data: DataConfig, limit: int = FIRST_ROWS, *, references: bool = True
) -> Checked:
    """Check the first ``limit`` rows of the first file with images; of the last file when none has images. Invalid rows raise
    nothing.

    Raises: DataError when a file cannot be read.
    """
    found = Checked()
    for path in files:
        found = Checked()
        for row in islice(checked_rows(path, data, images=ImageRules.of(data), references=references), limit):
            found.rows += 1
            if isinstance(row, Problem):
                found.add(row)
            else:
                found.count_images(row)
        if found.image_sizes or found.bad:
            break
    return found


def check_rows(path: str, data: DataConfig, *, references: bool = True) -> tuple[int, list[Problem]]:
    """Count the rows of a file of prompts and check them, before the model is loaded: all rows of a text file, which is read
    through anyway, the first CHECKED_ROWS of a parquet file, and of files with images the first FIRST_ROWS. Without
    ``references`` rows may lack a reference answer.

    Returns: the count, and the problems of the first bad rows (at most MAX_LISTED), and of rows that are templated already by the
    markers of a well-known family. Raises: DataError when it cannot be read.
    """
    file = Path(path).expanduser()
    is_table = kind_of(file) == "parquet"
    problems: list[Problem] = []
    templated: list[tuple[str, str]] = []
    rows, whole = 0, True
    for row in checked_rows(file, data, images=ImageRules.of(data), references=references):
        rows += 1
        if isinstance(row, Problem):
            problems.append(row)
        elif data.templated_prompts == "error" and (marker := marker_in(row.messages)):
            templated.append((f"{file.name}:{row.number}", marker))
        enough = isinstance(row, DatasetRow) and row.images and rows >= FIRST_ROWS
        if enough or len(problems) == MAX_LISTED or (is_table and rows == CHECKED_ROWS):
            whole = False
            break
    if templated:
        problems.append(templated_problem(templated, rows, "prompts", "data.templated_prompts"))
    return rows if whole else count_rows(path), problems


def check_sft_rows(path: str, data: SftDataConfig, *, tokenized: bool = False) -> tuple[int, list[Problem]]:
    """The same of a file for fine-tuning. Args: ``tokenized``, it holds tokens.

    Raises: DataError when it cannot be read, or lacks a column."""
    file = Path(path).expanduser()
    is_table = kind_of(file) == "parquet"
    problems: list[Problem] = []
    rows = 0
    for row in _sft_rows(path, data, tokenized=tokenized):
        rows += 1
        if isinstance(row, Problem):
            problems.append(row)
        if len(problems) == MAX_LISTED or (is_table and rows == CHECKED_ROWS):
            return count_rows(path), problems
    return rows, problems


def _rows(path: str, data: Purposed) -> Iterator[DatasetRow | SftRow | Problem]:
    if isinstance(data, SftDataConfig):
        return _sft_rows(path, data)
    if isinstance(data, EvaluateDataConfig):
        return checked_rows(path, data, responses=data.response_column)
    return checked_rows(path, data, images=ImageRules.of(data))


def _sft_rows(path: str, data: SftDataConfig, *, tokenized: bool = False) -> Iterator[SftRow | Problem]:
    columns, file = None, Path(path).expanduser()
    for number, record in enumerate(read_records(file)):
        columns = columns or choose_columns(record, data, file.name, tokenized=tokenized)
        yield row_of(record, number, file.name, columns, data)
