"""Rows that are done stay done; those of another request are never taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.errors import ConfigError
from posttrain.run.parts import Parts, folder_hashes, hashes

REQUEST: dict[str, Any] = {"config": {"run": {"seed": 1}}, "data.files": {"p.jsonl": "a1"}, "model.path": {"w": "b2"}}
TABLE = pa.table({"question": [f"q{row}" for row in range(5)]})


def parts(folder: Path, request: dict[str, Any] = REQUEST) -> Parts:
    """Five rows in parts of two: 0 1, 2 3, 4."""
    return Parts(folder / "out.parquet", request, column="responses", rows=5, rows_per_part=2)


def answers(made: Parts, part: int) -> list[list[str]]:
    return [[f"a{row}", f"b{row}"] for row in made.rows_of(part)]


def write(made: Parts, *numbers: int) -> None:
    made.begin()
    for number in numbers:
        made.write(number, answers(made, number))


def test_parts_in_any_order_make_the_table(tmp_path: Path) -> None:
    write(parts(tmp_path), 2, 0)
    assert parts(tmp_path).missing() == [1]
    made = parts(tmp_path)
    write(made, 1)
    made.finish(TABLE)
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert rows == [{"question": f"q{row}", "responses": [f"a{row}", f"b{row}"]} for row in range(5)]
    assert [path.name for path in tmp_path.iterdir()] == ["out.parquet"]
    assert parts(tmp_path).finished


def test_a_damaged_part_is_not_done(tmp_path: Path) -> None:
    made = parts(tmp_path)
    write(made, 0, 1, 2)
    (made.folder / "part_000001.parquet").write_bytes(b"PAR1 and then nothing")
    assert made.missing() == [1]
    (made.folder / "part_000001.parquet").write_bytes((made.folder / "part_000000.parquet").read_bytes())
    assert made.missing() == [1]  # it holds rows 0 and 1
    (made.folder / "part_000002.parquet.tmp").write_bytes(b"cut off")  # what a kill may leave
    assert made.missing() == [1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"config": {"run": {"seed": 2}}}, "made with run.seed 1, and this request has 2; set it back"),
        ({"data.files": {"p.jsonl": "a9"}}, "p.jsonl has changed since the finished rows in"),
        ({"model.path": {"w": "b9"}}, "w has changed since the finished rows in"),
    ],
)
def test_parts_of_another_request_are_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    write(parts(tmp_path), 0)
    parts(tmp_path).check()
    with pytest.raises(ConfigError, match="--overwrite") as raised:
        parts(tmp_path, REQUEST | change).check()
    assert says in str(raised.value)
    assert raised.value.problems[0].field in ("run.seed", "data.files", "model.path")


def test_a_file_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    made = parts(tmp_path)
    write(made, 0, 1, 2)
    made.finish(TABLE)
    with pytest.raises(ConfigError, match="not made by this request"):
        assert parts(tmp_path, REQUEST | {"config": {}}).finished
    (tmp_path / "out.parquet").write_text("mine")
    with pytest.raises(ConfigError, match="not made by this request"):
        assert made.finished
    made.discard()
    assert not made.finished and list(tmp_path.iterdir()) == []


def test_rows_of_no_response_and_odd_texts_survive(tmp_path: Path) -> None:
    made = Parts(tmp_path / "o.parquet", REQUEST, column="r", rows=1, rows_per_part=9)
    made.begin()
    made.write(0, [["", "\x00", "é\u2028" * 3]])
    made.finish(pa.table({"n": [1]}))
    assert pq.read_table(tmp_path / "o.parquet")["r"].to_pylist() == [["", "\x00", "é\u2028" * 3]]


def test_hashes_are_of_contents(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").write_text("x")
    assert len(set(hashes([tmp_path / "a", tmp_path / "b"]).values())) == 1
    before = folder_hashes(tmp_path)
    assert list(before) == ["a", "b"]
    (tmp_path / "b").write_text("y")
    assert folder_hashes(tmp_path) != before
