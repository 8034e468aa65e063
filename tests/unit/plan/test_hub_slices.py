"""A slice of a data set of the hub means rows of all its files together."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.config import SftConfig
from posttrain.libraries.hub_names import HubName, data_name, portable
from posttrain.plan.hub import replace_data


def config(*files: str, sources: list[str]) -> SftConfig:
    data = {"train_files": list(files), "train_sources": sources, "source_weights": dict.fromkeys(sources, 1.0)}
    return SftConfig.model_validate({"model": {"path": "m"}, "data": data})


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("[2:8]", ["a[2:4]", "b", "c[0:1]"]),  # rows 0 to 3 are in a, 4 to 6 in b, 7 to 9 in c
        ("[:50%]", ["a", "b[0:1]"]),
        ("[-1:]", ["c[2:3]"]),
        ("[3:3]", ["a[0:0]"]),
        ("", ["a", "b", "c"]),
    ],
)
def test_rows_are_counted_over_all_files(tmp_path: Path, part: str, expected: list[str]) -> None:
    files = []
    for name, rows in (("a", 4), ("b", 3), ("c", 3)):
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text('{"question": "x", "answer": "y"}\n' * rows)

    def fetched(wanted: HubName, field: str) -> list[str]:
        assert (wanted.name, wanted.split, field) == ("org/rows", "train", "data.train_files")
        return list(map(str, files))

    data = replace_data(config(f"org/rows:train{part}", "x.jsonl", sources=["hub", "own"]), fetched).data
    named = [name.partition("[") for name in expected]
    assert data.train_files == [f"{tmp_path}/{name}.jsonl{mark}{rest}" for name, mark, rest in named] + ["x.jsonl"]
    # Each file of the data set has its source
    assert data.train_sources == ["hub"] * len(expected) + ["own"]


def test_names_keep_their_slice() -> None:
    name = data_name("org/rows/main:train[-5:]")
    assert name is not None and (name.config, name.split, str(name.rows)) == ("main", "train", "[-5:]")
    assert name.key == "datasets/org/rows"  # of its commit
    files = data_name("hf://datasets/org/rows@v1/data/train.parquet[0:5]")
    assert files is not None and (files.files, str(files.rows)) == ("data/train.parquet", "[0:5]")
    commit = "0" * 40
    cached = f"/c/datasets--org--rows/snapshots/{commit}/train.parquet[0:5]"
    assert portable(cached, {"datasets/org/rows": commit}) == "hf://datasets/org/rows/train.parquet[0:5]"
