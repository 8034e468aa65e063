"""Arrow files: the stream that datasets writes (save_to_disk), and the file format."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from posttrain.data.record_files import count_rows, read_records
from posttrain.errors import DataError

ROWS = [{"prompt": [{"role": "user", "content": f"{n}?"}], "answer": str(n)} for n in range(5)]


@pytest.mark.parametrize("new", [pa.ipc.new_stream, pa.ipc.new_file])
def test_both_formats_give_the_rows_in_order(tmp_path: Path, new: object) -> None:
    table, file = pa.Table.from_pylist(ROWS), tmp_path / "data-00000-of-00001.arrow"
    with new(str(file), table.schema) as writer:  # type: ignore[operator]  # pyarrow has no types
        writer.write_table(table, max_chunksize=2)
    assert list(read_records(file)) == ROWS
    assert count_rows(file) == 5


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.arrow"
    file.write_bytes(b"ARROW1 and nothing more")
    with pytest.raises(DataError, match=r"rows\.arrow cannot be read"):
        list(read_records(file))
    file.write_bytes(b"")
    with pytest.raises(DataError, match=r"rows\.arrow cannot be read"):
        list(read_records(file))
