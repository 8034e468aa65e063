"""Files with a slice behind their name, and folders of files, read as any other file is."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.config.data import DataConfig
from posttrain.data.readers import data_sources, read_rows
from posttrain.data.record_files import count_rows, first_record, read_records
from posttrain.errors import DataError


def written(folder: Path, kind: str, first: int = 0, rows: int = 10) -> str:
    """A file whose rows are numbered."""
    table = [{"prompt": str(n), "data_source": f"s{n}", "answer": ""} for n in range(first, first + rows)]
    file = folder / f"train-{first}.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(table), file)
    elif kind == "arrow":
        with pa.ipc.new_stream(str(file), pa.Table.from_pylist(table).schema) as stream:
            stream.write_table(pa.Table.from_pylist(table))
    elif kind == "csv":
        file.write_text(
            "\n".join(["prompt,data_source,answer", *(f"{row['prompt']},{row['data_source']}," for row in table)])
        )
    else:
        file.write_text("\n".join(json.dumps(row) for row in table))
    return str(file)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "csv", "jsonl", "json"])
@pytest.mark.parametrize(
    ("part", "expected"), [("[2:4]", [2, 3]), ("[-1:]", [9]), ("[:20%]", [0, 1]), ("", [*range(10)])]
)
def test_only_the_rows_of_the_slice_are_read(tmp_path: Path, kind: str, part: str, expected: list[int]) -> None:
    path = written(tmp_path, kind) + part
    assert [int(record["prompt"]) for record in read_records(path)] == expected
    assert count_rows(path) == len(expected)
    assert [row.messages[0]["content"] for row in read_rows(path, DataConfig())] == [str(n) for n in expected]
    assert data_sources(path, DataConfig()) == {f"s{n}" for n in expected}
    record, problems = first_record(path, "data.train_files")
    assert not problems and record is not None and record["prompt"] == str(expected[0])


def test_a_slice_without_rows_and_one_of_a_missing_file_are_named(tmp_path: Path) -> None:
    path = written(tmp_path, "jsonl")
    assert first_record(f"{path}[10:]", "f")[1][0].what == f"{path}[10:] holds no rows"
    (problem,) = first_record(f"{tmp_path}/train-1.jsonl[:5]", "f")[1]
    assert problem.what == f"there is no file {tmp_path}/train-1.jsonl" and "train-0.jsonl" in problem.fix


def test_a_file_may_be_called_like_a_slice(tmp_path: Path) -> None:
    path = Path(written(tmp_path, "jsonl")).rename(tmp_path / "a[1:2].jsonl")
    assert count_rows(path) == 10


def test_a_folder_means_its_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / ".cache").mkdir()
    written(tmp_path / ".cache", "parquet", 90)
    for first in (5, 0):
        written(tmp_path, "parquet", first, rows=5)
    assert [int(record["prompt"]) for record in read_records(tmp_path)] == list(range(10))
    assert [int(record["prompt"]) for record in read_records(f"{tmp_path}[3:6]")] == [3, 4, 5]
    assert count_rows(tmp_path) == 10
    written(tmp_path, "jsonl")
    with pytest.raises(DataError, match=r"files of several kinds: \.jsonl, \.parquet"):
        count_rows(tmp_path)


def test_a_data_set_that_was_saved_to_disk_is_the_files_that_its_state_lists(tmp_path: Path) -> None:
    names = [Path(written(tmp_path, "arrow", first, rows=2)).name for first in (4, 0)]
    written(tmp_path, "arrow", 8)  # of its cache
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    assert [int(record["prompt"]) for record in read_records(tmp_path)] == [4, 5, 0, 1]
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(DataError, match="does not list the files of a data set that was saved to disk"):
        count_rows(tmp_path)


def test_of_several_splits_that_were_saved_together_one_has_to_be_named(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        name = Path(written(tmp_path / split, "arrow")).name
        (tmp_path / split / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    (problem,) = first_record(str(tmp_path), "data.train_files")[1]
    assert "holds the splits of a data set" in problem.what
    assert problem.fix == f"name one: {tmp_path}/test, {tmp_path}/train"
    assert count_rows(tmp_path / "train") == 10


def test_a_part_of_a_saved_data_set_that_vanished_is_named(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data-00000.arrow"}]}')
    (problem,) = first_record(str(tmp_path), "data.train_files")[1]
    assert "data-00000.arrow" in problem.what


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    (problem,) = first_record(str(tmp_path), "data.train_files")[1]
    assert problem.what == f"{tmp_path} is a folder without data files" and problem.field == "data.train_files"


def test_a_parquet_file_is_known_by_its_beginning_where_its_name_says_nothing(tmp_path: Path) -> None:
    path = Path(written(tmp_path, "parquet")).rename(tmp_path / "Qwen2.5-7B")
    assert count_rows(path) == 10
    assert [int(record["prompt"]) for record in read_records(f"{path}[2:4]")] == [2, 3]
    other = tmp_path / "notes.txt"
    other.write_text("PA")
    with pytest.raises(DataError, match="of no known kind"):
        count_rows(other)
