"""Prompts of worlds without a dataset, and whole rows of files for worlds with one."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.config.data import DataConfig
from posttrain.config.environment import EnvironmentConfig
from posttrain.data.episodes import training_episodes, validation_episodes
from posttrain.data.readers import read_rows
from posttrain.errors import DataError

ROW = {"prompt": [{"role": "user", "content": "q"}], "db_id": "shop", "extra_info": {"level": 2}}


def test_seeds_of_training_and_validation_are_apart() -> None:
    config = EnvironmentConfig(name="maze", train_episodes=2, validation_episodes=2)
    training, validation = training_episodes(config), validation_episodes(config)
    assert [prompt.extra_info["seed"] for prompt in training] == [1_000_000, 1_000_001]
    assert [prompt.extra_info["seed"] for prompt in validation] == [0, 1]
    assert [prompt.prompt_id for prompt in training] == ["train:0", "train:1"]
    assert training[0].data_source == "maze" and training[0].token_ids == ()
    assert validation_episodes(EnvironmentConfig()) == []


def test_named_environments_take_turns_by_weight() -> None:
    config = EnvironmentConfig.model_validate(
        {"named": {"a": {"name": "x", "weight": 3}, "b": {"name": "y"}}, "train_episodes": 8, "column": "tag"}
    )
    names = [prompt.extra_info["tag"] for prompt in training_episodes(config)]
    # shares 3/4 and 1/4: a is owed .75, then b .5 against a .5 (the first wins), then b .75
    assert names == ["a", "a", "b", "a", "a", "a", "b", "a"]
    assert [prompt.data_source for prompt in training_episodes(config)] == names


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_whole_rows_without_a_reference_answer(kind: str, tmp_path: Path) -> None:
    file = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        file.write_text(json.dumps(ROW) + "\n")
    else:
        pq.write_table(pa.Table.from_pylist([ROW]), file)
    (row,) = read_rows(file, DataConfig(train_files=[], extra_columns=["*"]))
    assert row.ground_truth is None
    assert row.extra_info == {"level": 2, "db_id": "shop", "extra_info": {"level": 2}}
    with pytest.raises(DataError, match=r"none of the columns reward_model\.ground_truth"):
        list(read_rows(file, DataConfig(train_files=[])))
    with pytest.raises(DataError, match="no column 'truth'"):
        list(read_rows(file, DataConfig(train_files=[], extra_columns=["*"], ground_truth_column="truth")))
