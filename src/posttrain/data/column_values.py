"""The distinct values of one column of a dataset file, read without its other columns where the format allows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from posttrain.data.columns import Named
from posttrain.data.record_files import is_whole_parquet, readable, records


def column_values(path: str, column: str, data: Named) -> set[Any]:
    """Return the values that rows have in a column of the file, or in its column of extra information; None stands for rows
    without one. Values that are no text or number count as their text.

    Raises: DataError when the file cannot be read.
    """
    file = Path(path).expanduser()
    with readable(file):
        return {each if isinstance(each, (str, int, type(None))) else str(each) for each in _values(file, column, data)}


def _values(file: Path, column: str, data: Named) -> Iterator[Any]:
    inside = data.extra_info_column
    rows: Iterator[Mapping[str, Any]]
    if is_whole_parquet(file):
        with pq.ParquetFile(file) as table:
            schema = table.schema_arrow
            wanted = [column] if column in schema.names else []
            if inside in schema.names and pa.types.is_struct(schema.field(inside).type):
                wanted += [f"{inside}.{column}"] if schema.field(inside).type.get_field_index(column) >= 0 else []
            if not wanted:
                yield None
                return
            rows = iter(table.read(columns=wanted).to_pylist())
            yield from (_value(row, column, inside) for row in rows)
        return
    yield from (_value(row, column, inside) for row in records(file, None))


def _value(row: Mapping[str, Any], column: str, inside: str) -> Any:
    info = row.get(inside)
    within = info.get(column) if isinstance(info, Mapping) else None
    return row[column] if row.get(column) is not None else within
