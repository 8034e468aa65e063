"""The files of a config and a split, by the head of README.md or by their names."""

from __future__ import annotations

import pytest

from posttrain.errors import DataError
from posttrain.libraries.hub_names import data_name
from posttrain.libraries.hub_splits import files_of, matching

CONFIGS = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: [main/test-*]}
- config_name: socratic
  data_dir: socratic
---
# A card
"""
NAMES = ["README.md", "main/train-0.parquet", "main/test-0.parquet", "socratic/train.parquet", "socratic/dev.parquet"]


def chosen(text: str, names: list[str], readme: str = "", field: str = "data.train_files") -> list[str]:
    wanted = data_name(text)
    assert wanted is not None
    return files_of(wanted, names, readme, field)


def test_configs_of_the_readme() -> None:
    assert chosen("o/d/main:train", NAMES, CONFIGS) == ["main/train-0.parquet"]
    assert chosen("o/d/main:test", NAMES, CONFIGS) == ["main/test-0.parquet"]
    assert chosen("o/d/socratic:validation", NAMES, CONFIGS) == ["socratic/dev.parquet"]
    with pytest.raises(DataError, match=r"several configs: main, socratic; name one: o/d/main:train"):
        chosen("o/d", NAMES, CONFIGS)
    with pytest.raises(DataError, match=r"no config mein; did you mean main"):
        chosen("o/d/mein:train", NAMES, CONFIGS)
    with pytest.raises(DataError, match=r"no split dev .splits: train, test"):
        chosen("o/d/main:dev", NAMES, CONFIGS)
    assert chosen("o/d", NAMES, CONFIGS.replace("name: socratic", "name: default")) == ["socratic/train.parquet"]
    assert chosen("o/d", NAMES, CONFIGS.replace("main\n", "main\n  default: true\n", 1)) == ["main/train-0.parquet"]
    with pytest.raises(DataError, match=r"README.md is not YAML"):
        chosen("o/d", NAMES, "---\na: [\n---\n")


@pytest.mark.parametrize(
    ("names", "split", "files"),
    [
        (["a.jsonl", "b.jsonl"], "train", ["a.jsonl", "b.jsonl"]),
        (["x_train.csv", "x_test.csv"], "test", ["x_test.csv"]),
        (["train/a.json", "eval/a.json"], "test", ["eval/a.json"]),
        (["data/odd-00000-of-00001.parquet"], "odd", ["data/odd-00000-of-00001.parquet"]),
        (["latest.jsonl", "train.jsonl"], "train", ["train.jsonl"]),  # no word of it is test
    ],
)
def test_splits_by_name(names: list[str], split: str, files: list[str]) -> None:
    assert chosen(f"o/d:{split}", names) == files


def test_files_of_one_kind() -> None:
    with pytest.raises(DataError, match=r"several kinds: .parquet, .csv; name those of one kind: hf://datasets/o/d"):
        chosen("o/d", ["a.csv", "a.parquet"])
    assert chosen("hf://datasets/o/d/*.csv", ["a.csv", "a.parquet", "b/a.csv"]) == ["a.csv"]
    with pytest.raises(DataError, match=r"no file matches b.arrow"):
        chosen("hf://datasets/o/d/b.arrow", ["b.arrow"])
    with pytest.raises(DataError, match=r"no split train"):
        chosen("o/d", ["rows.arrow", "script.py"])


def test_patterns() -> None:
    names = ["a.csv", "b/a.csv", "b/c/a.csv", "b/c/b.csv"]
    assert matching("**/a.csv", names) == ["a.csv", "b/a.csv", "b/c/a.csv"]
    assert matching("b/*/[b].csv", names) == ["b/c/b.csv"]
    assert matching("b", names) == ["b/a.csv", "b/c/a.csv", "b/c/b.csv"]
    assert matching("b/c/[!a].csv", names) == ["b/c/b.csv"]
    assert matching("b/c/[^a].csv", names) == ["b/c/b.csv"]


def test_a_pattern_that_is_none() -> None:
    with pytest.raises(
        DataError, match=r"\[z-a\].csv is not a pattern of files: bad character range z-a; write \[a-z\]"
    ):
        chosen("hf://datasets/o/d/[z-a].csv", ["a.csv"])


@pytest.mark.parametrize(
    ("said", "files"),
    [
        ("[a.csv, {split: test, path: b.csv}]", ["a.csv"]),
        ("[{split: train, path: a.csv}, {split: train, path: b.csv}]", ["a.csv", "b.csv"]),
        ("[{split: train, path: [a.csv, null]}]", ["a.csv"]),
    ],
)
def test_files_of_a_config_in_every_form(said: str, files: list[str]) -> None:
    head = f"---\nconfigs:\n- config_name: main\n  data_files: {said}\n---\n"
    assert chosen("o/d", ["a.csv", "b.csv"], head) == files


def test_a_config_whose_split_has_no_path() -> None:
    with pytest.raises(DataError, match="the split train has no file of a kind"):
        chosen(
            "o/d", ["a.csv"], "---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: train, path: null}\n---\n"
        )
