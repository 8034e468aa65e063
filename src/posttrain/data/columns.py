"""Choice of the columns that hold the prompt, the task, the reference answer, the extra information and the responses.

A column named in the configuration is used. Otherwise the first of the usual names that the file has is chosen: those of
verl, ROLL and SkyRL.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from posttrain.config.data import DataConfig
from posttrain.data.images import ImageRules
from posttrain.errors import DataError, Problem, nearest

PROMPT = ("prompt", "messages")
DATA_SOURCE = ("data_source", "tag", "env_class")
ALL = "*"  # in data.extra_columns: every column; a reference answer is then optional
GROUND_TRUTH = ("reward_model.ground_truth", "reward_spec.ground_truth", "ground_truth", "answer")


# Names of other datasets, for suggestions: they are not read unless they are named.
LIKELY = {
    "prompt_column": ("question", "query", "problem", "instruction", "input"),
    "ground_truth_column": ("solution", "target", "label", "gold", "final_answer", "reference", "output"),
}


class Named(Protocol):
    """Column settings of a configuration; null leaves the choice to the file."""

    @property
    def prompt_column(self) -> str | None: ...
    @property
    def data_source_column(self) -> str | None: ...
    @property
    def ground_truth_column(self) -> str | None: ...
    @property
    def extra_info_column(self) -> str: ...
    @property
    def extra_columns(self) -> list[str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of one file. ``ground_truth`` may be a dotted path into a nested column."""

    prompt: str | None  # None: a file of responses without one
    data_source: str | None  # None: the file has no such column; its own name is used as the task
    ground_truth: str | None  # None: not read
    extra_info: str  # may be absent from the file
    responses: str | None = None  # None: not read
    extra: tuple[str, ...] = ()  # columns copied into the extra information, where the file has them
    images: str | None = None  # None: the file has none, or they are not read
    videos: str | None = None

    def roots(self) -> set[str]:
        """Return the top-level columns that may be needed."""
        named = {self.prompt, self.data_source, self.extra_info, self.ground_truth, self.responses}
        named |= {self.images, self.videos, *self.extra}
        return {name for name in named if name is not None} | {root(name) for name in named if name is not None}


class ColumnChoice:
    """Choice of the columns of one file, made at its header, or at its first row where each row has keys of its own.

    Args: ``prompts_only`` ignores all other columns; ``responses`` requires this column, and makes the prompt optional;
        ``images`` includes the columns of images and videos, which may be absent. Without ``references`` nothing is scored: the
        reference answer is taken where a row has one, and may be absent unless its column is named; so may the task, under
        its usual names.
    """

    def __init__(
        self,
        data: Named,
        *,
        prompts_only: bool = False,
        responses: str | None = None,
        images: ImageRules | None = None,
        references: bool = True,
    ):
        self.images = images
        self.may_lack_reference = not references and data.ground_truth_column is None
        self._references = references
        self._data = data
        self._prompts_only = prompts_only
        self._responses = responses
        self._columns: Columns | None = None

    @property
    def columns(self) -> Columns:
        """The columns chosen by ``check``, which must have been called."""
        assert self._columns is not None
        return self._columns

    def check(self, names: Collection[str], has: Callable[[str], bool], place: str) -> Columns:
        """Choose the columns at the first call, and check at every call that ``names`` holds them.

        Args: ``names`` are the top-level columns; ``has`` returns True when a dotted path exists; ``place`` names in errors what
            lacks the column.
        Raises: DataError with every missing column and the nearest existing one.
        """
        data, known = self._data, self._columns
        everything = ALL in data.extra_columns
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
            if not self._references and named in DATA_SOURCE and named not in names:
                return None  # a default of the peers' files
            if named is not None or (known is None and set(DATA_SOURCE) & set(names)):
                return take("data_source_column", named, DATA_SOURCE)
            # A misspelled column is an error, a missing one is not.
            if known is None and nearest(DATA_SOURCE[0], list(names)):
                problems.append(_none_of(DATA_SOURCE, names, place, "data_source_column"))
            return None

        def ground_truth() -> str | None:
            if self.may_lack_reference:
                return next(filter(has, GROUND_TRUTH), None)
            named = known.ground_truth if known else data.ground_truth_column
            if everything and named is None and (known or not any(map(has, GROUND_TRUTH))):
                return None
            return take("ground_truth_column", named, GROUND_TRUTH)

        def prompt() -> str | None:
            named = known.prompt if known else data.prompt_column
            if self._responses and named is None and (known or not set(PROMPT) & set(names)):
                return None
            return take("prompt_column", named, PROMPT)

        def optional(field: str, named: str | None) -> str | None:
            """Return a column that may be absent, but must exist when it was named explicitly."""
            if named is not None and named != DataConfig.model_fields[field].default:
                return take(field, named, ())
            return named if named in names else None

        rules = self.images
        images = optional("image_column", rules.column) if rules else None
        videos = optional("video_column", rules.video_column) if rules else None
        if self._prompts_only:
            columns = Columns(
                prompt=prompt(), data_source=None, ground_truth=None, extra_info="", images=images, videos=videos
            )
        else:
            columns = Columns(
                prompt=prompt(),
                data_source=source(),
                ground_truth=ground_truth(),
                extra_info=data.extra_info_column,
                responses=take("response_column", self._responses, ()) if self._responses else None,
                extra=tuple(name for name in (names if everything else data.extra_columns) if name != images),
                images=images,
                videos=videos,
            )
            # An extra column may be absent, but not misspelled.
            free = [name for name in names if name not in data.extra_columns]
            for column in [] if everything else data.extra_columns:
                if column not in names and (meant := nearest(column, free)):
                    found = _missing(column, names, place, "extra_columns")
                    problems.append(replace(found, fix=f"did you mean data.extra_columns={meant}?"))
        # extra_info may be absent, but a column named explicitly must exist.
        if not self._prompts_only and data.extra_info_column != DataConfig.model_fields["extra_info_column"].default:
            take("extra_info_column", data.extra_info_column, ())
        if problems:
            raise DataError(problems)
        self._columns = columns
        return columns


def root(column: str) -> str:
    """Return the top-level column of a dotted path."""
    return column.split(".")[0]


def _missing(column: str, names: Collection[str], place: str, field: str) -> Problem:
    guess = nearest(column, list(names))
    return Problem(
        f"{place} has no column {column!r} (columns: {', '.join(names)})",
        fix=f"did you mean data.{field}={guess}?" if guess else f"add it, or name another with data.{field}",
        field=f"data.{field}",
    )


def _none_of(usual: Sequence[str], names: Collection[str], place: str, field: str) -> Problem:
    guess = next((name for name in LIKELY.get(field, ()) if name in names), None)
    guess = guess or next(filter(None, (nearest(column, list(names)) for column in usual)), None)
    return Problem(
        f"{place} has none of the columns {', '.join(usual)} (columns: {', '.join(names)})",
        fix=f"did you mean data.{field}={guess}?" if guess else f"name the one it has with data.{field}",
        field=f"data.{field}",
    )
