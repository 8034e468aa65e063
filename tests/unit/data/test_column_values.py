"""The values of one column, of a file of any kind."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.config.data import DataConfig
from posttrain.data.column_values import column_values
from posttrain.errors import DataError

ROWS = [
    {"kind": "a", "extra_info": {"kind": "x", "n": 1}},
    {"kind": None, "extra_info": {"kind": "b", "n": 2}},
    {"kind": None, "extra_info": {"kind": None, "n": 3}},
]


@pytest.fixture(params=["parquet", "jsonl"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    path = tmp_path / f"rows.{request.param}"
    if request.param == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    else:
        path.write_text("\n".join(map(json.dumps, ROWS)))
    return str(path)


def test_a_column_goes_before_the_extra_information(file: str) -> None:
    data = DataConfig(train_files=[file])
    assert column_values(file, "kind", data) == {"a", "b", None}
    assert column_values(file, "n", data) == {1, 2, 3}
    assert column_values(file, "other", data) == {None}


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        column_values(str(tmp_path / "none.parquet"), "kind", DataConfig(train_files=["f"]))
