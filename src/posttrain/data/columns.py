"""Which columns of a file hold the prompt, the task, the reference answer and the extra information.

A column that the configuration names is taken as it is. One that it leaves open is the first of the usual names that the
file has: those of verl, ROLL and SkyRL.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from posttrain.config.data import DataConfig
from posttrain.errors import DataError, Problem, nearest

PROMPT = ("prompt", "messages")
DATA_SOURCE = ("data_source", "tag", "env_class")
GROUND_TRUTH = ("reward_model.ground_truth", "reward_spec.ground_truth", "ground_truth", "answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of one file. ``ground_truth`` may be a dotted path into a nested column."""

    prompt: str
    data_source: str | None  # None: the file has no such column, and its own name stands for the task
    ground_truth: str
    extra_info: str  # may be absent from the file

    def roots(self) -> set[str]:
        """Top-level columns that may be needed."""
        named = {self.prompt, self.data_source, self.extra_info, self.ground_truth, root(self.ground_truth)}
        return {name for name in named if name is not None}


class ColumnChoice:
    """The columns of one file: decided at its header, or at its first row where each row has keys of its own."""

    def __init__(self, data: DataConfig):
        self._data = data
        self._columns: Columns | None = None

    @property
    def columns(self) -> Columns:
        """What ``check`` decided; it must have been called."""
        assert self._columns is not None
        return self._columns

    def check(self, names: Collection[str], has: Callable[[str], bool], place: str) -> Columns:
        """The columns. The first call decides, and every call makes sure that ``names`` holds them.

        Args: ``names`` are the top-level columns; ``has`` tells whether a dotted path can be reached; ``place`` says in
            errors what lacks the column.
        Raises: DataError with everything that is missing and the nearest column that is there.
        """
        data, known = self._data, self._columns
        problems: list[Problem] = []

        def take(field: str, named: str | None, usual: Sequence[str]) -> str:
            column = named or next(filter(has, usual), None) or next((c for c in usual if root(c) in names), None)
            if column is None:
                problems.append(_none_of(usual, names, place, field))
            elif column not in names and root(column) not in names:
                problems.append(
                    _missing(column if field == "ground_truth_column" else root(column), names, place, field)
                )
            return column or ""

        def source() -> str | None:
            named = known.data_source if known else data.data_source_column
            if named is not None or (known is None and set(DATA_SOURCE) & set(names)):
                return take("data_source_column", named, DATA_SOURCE)
            if known is None and nearest(DATA_SOURCE[0], list(names)):  # a misspelling is not the same as none
                problems.append(_none_of(DATA_SOURCE, names, place, "data_source_column"))
            return None

        columns = Columns(
            prompt=take("prompt_column", known.prompt if known else data.prompt_column, PROMPT),
            data_source=source(),
            ground_truth=take(
                "ground_truth_column", known.ground_truth if known else data.ground_truth_column, GROUND_TRUTH
            ),
            extra_info=data.extra_info_column,
        )
        # extra_info may be absent, but a column the user named himself is meant to be there.
        if data.extra_info_column != DataConfig.model_fields["extra_info_column"].default:
            take("extra_info_column", data.extra_info_column, ())
        if problems:
            raise DataError(problems)
        self._columns = columns
        return columns


def root(column: str) -> str:
    """The top-level column of a dotted path."""
    return column.split(".")[0]


def _missing(column: str, names: Collection[str], place: str, field: str) -> Problem:
    guess = nearest(column, list(names))
    return Problem(
        f"{place} has no column {column!r} (columns: {', '.join(names)})",
        fix=f"did you mean data.{field}={guess}?" if guess else f"add it, or name another with data.{field}",
        field=f"data.{field}",
    )


def _none_of(usual: Sequence[str], names: Collection[str], place: str, field: str) -> Problem:
    guess = next(filter(None, (nearest(column, list(names)) for column in usual)), None)
    return Problem(
        f"{place} has none of the columns {', '.join(usual)} (columns: {', '.join(names)})",
        fix=f"did you mean data.{field}={guess}?" if guess else f"name the one it has with data.{field}",
        field=f"data.{field}",
    )
