"""Rows of dataset files with the methods of a Hugging Face dataset that classes written for verl call on ``self.dataframe``."""

from __future__ import annotations

import copy
import importlib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


class Table:
    """Rows, numbered from 0. A row that is taken out is a copy, so that changes to it stay outside.

    Methods take and ignore the further arguments of ``datasets`` (num_proc, desc, load_from_cache_file ...): rows are in memory.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]):
        self._rows: list[Row] = [dict(row) for row in rows]

    @property
    def column_names(self) -> list[str]:
        return list(dict.fromkeys(name for row in self._rows for name in row))

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return (copy.deepcopy(row) for row in self._rows)

    def __getitem__(self, item: Any) -> Any:
        """A number gives a row, a name a column, a slice or a list of numbers the columns of these rows."""
        if isinstance(item, str):
            return [copy.deepcopy(row.get(item)) for row in self._rows]
        if isinstance(item, slice):
            return _columns(self._rows[item])
        if isinstance(item, list | tuple):
            return _columns([self._rows[index] for index in item])
        return copy.deepcopy(self._rows[item])

    def filter(self, function: Callable[..., Any], with_indices: bool = False, **_: Any) -> Table:
        """Keep the rows for which the function is true."""
        kept = [function(row, *([index] if with_indices else [])) for index, row in enumerate(self)]
        return Table([row for row, keep in zip(self._rows, kept, strict=True) if keep])

    def map(
        self, function: Callable[..., Any], with_indices: bool = False, remove_columns: Any = None, **settings: Any
    ) -> Table:
        """Add to each row what the function returns of it. Raises: NotImplementedError for ``batched=True``."""
        if settings.get("batched"):
            raise NotImplementedError("map(batched=True) needs the library datasets: pip install datasets")
        further = settings.get("fn_kwargs") or {}
        gone = {remove_columns} if isinstance(remove_columns, str) else set(remove_columns or ())
        made = []
        for index, row in enumerate(self):
            found = function(row, *([index] if with_indices else []), **further) or {}
            made.append({**{name: value for name, value in row.items() if name not in gone}, **found})
        return Table(made)

    def select(self, indices: Any, **_: Any) -> Table:
        return Table([self._rows[int(index)] for index in indices])

    def shuffle(self, seed: int | None = None, **_: Any) -> Table:
        return Table(random.Random(seed).sample(self._rows, len(self._rows)))

    def add_column(self, name: str, column: Sequence[Any], **_: Any) -> Table:
        return Table([{**row, name: value} for row, value in zip(self._rows, column, strict=True)])

    def remove_columns(self, column_names: Any) -> Table:
        gone = {column_names} if isinstance(column_names, str) else set(column_names)
        return Table([{name: value for name, value in row.items() if name not in gone} for row in self._rows])

    def rename_column(self, original_column_name: str, new_column_name: str) -> Table:
        names = {original_column_name: new_column_name}
        return Table([{names.get(name, name): value for name, value in row.items()} for row in self._rows])

    def to_list(self) -> list[Row]:
        return list(self)

    def to_pandas(self) -> Any:
        """Return a data frame of pandas, where that is installed."""
        return importlib.import_module("pandas").DataFrame(self.to_list())


def _columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [copy.deepcopy(row.get(name)) for row in rows] for name in names}


def arguments_taken(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the offered keyword arguments that a function or class takes."""
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return dict(offered)
    names = {each.name for each in parameters}
    return {name: value for name, value in offered.items() if name in names}
