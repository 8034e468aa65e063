"""Checks of the user's own dataset and sampler classes, from their source."""

from __future__ import annotations

import pytest

from posttrain.config import RunConfig
from posttrain.config.checks.own_classes import own_class_problems
from posttrain.plan.checks.own_classes import check_own_classes

CODE = """
from torch.utils.data import Dataset
class Good(Dataset):
    def __init__(self, data_files, tokenizer, config, processor=None, *, more=3): ...
class Old(Dataset):
    def __init__(self, parquet_files, tokenizer, **kwargs): ...
class Needs(Dataset):
    def __init__(self, data_files, corpus, *, split): ...
class Inherits(Good): ...
def made(data_files): ...
class Order:
    def __init__(self, data_source, data_config): ...
"""


@pytest.fixture
def config(tmp_path):
    (tmp_path / "own.py").write_text(CODE)

    def make(**data):
        places = {key: str(tmp_path / value) if key.endswith("_file") else value for key, value in data.items()}
        return RunConfig.model_validate({"model": {"path": "m"}, "data": {"train_files": ["a.parquet"], **places}})

    return make


@pytest.mark.parametrize("name", ["Good", "Old", "Inherits"])
def test_classes_that_take_what_they_are_given(config, name: str):
    assert check_own_classes(config(dataset_class_file="own.py", dataset_class_name=name)) == []
    assert check_own_classes(config(sampler_class_file="own.py", sampler_class_name="Order")) == []


def test_files_names_and_parameters_are_checked_without_running_them(config):
    [problem] = check_own_classes(config(dataset_class_file="own.py", dataset_class_name="Needs"))
    assert "Needs in" in problem.what and "needs corpus, split, and is constructed with data_files, " in problem.what
    assert problem.field == "data.dataset_class_name"
    [problem] = check_own_classes(config(dataset_class_file="own.py", dataset_class_name="Godo"))
    assert "defines no 'Godo'" in problem.what and "did you mean Good?" in problem.fix
    [problem] = check_own_classes(config(sampler_class_file="order.py", sampler_class_name="Order"))
    assert problem.what.startswith("there is no file") and problem.field == "data.sampler_class_file"
    [problem] = check_own_classes(config(dataset_class_file="own.py", dataset_class_name="made"))
    assert "is a function, and a dataset is a class" in problem.what


def test_settings_that_do_not_go_together(config):
    def fields(**changes):
        return [problem.field for problem in own_class_problems(config(**changes))]

    order = {"sampler_class_file": "own.py", "sampler_class_name": "Order"}
    assert fields(**order) == []
    assert fields(dataset_class_file="own.py") == ["data.dataset_class_name"]
    assert fields(sampler_class_name="Order") == ["data.sampler_class_file"]
    assert fields(**order, domains={"a": {"sources": ["s"], "prompts_per_step": 8}}) == ["data.sampler_class_file"]
    assert fields(**order, dataset_class_file="own.py", dataset_class_name="Good", max_prompts=3) == [
        "data.max_prompts"
    ]
