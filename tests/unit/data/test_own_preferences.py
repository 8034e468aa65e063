"""Pairs and labelled completions from a dataset class of the user's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.config.tune import TuneConfig
from posttrain.data.own_preferences import load_own_preferences
from posttrain.data.preferences import PreferenceSet
from posttrain.errors import DataError

CLASSES = """
import torch

def side(prefix, *ids, learned=2):
    mask = [0] * (len(ids) - learned) + [1] * learned
    return {prefix + "input_ids": torch.tensor(ids), prefix + "loss_mask": torch.tensor(mask)}

class Pairs:
    def __init__(self, parquet_files, tokenizer, config):
        self.items = [
            side("chosen_", 5, 6, 7, 2) | side("rejected_", 5, 6, 8, 2) | {"by": torch.tensor(0.5)}, self.second(),
        ]
    def second(self):
        padded = {"chosen_attention_mask": [1, 1, 1, 0]}
        return side("chosen_", 5, 7, 2, 0, learned=3) | padded | side("rejected_", 5, 8, 2) | {"by": 2}
    def __len__(self):
        return len(self.items)
    def __getitem__(self, index):
        return self.items[index]

class Equal(Pairs):
    def second(self):
        return side("chosen_", 5, 7, 2) | side("rejected_", 5, 7, 2)

class OneSide(Pairs):
    def second(self):
        return side("chosen_", 5, 7, 2)

class OddMargin(Pairs):
    def second(self):
        return side("chosen_", 5, 7, 2) | side("rejected_", 5, 8, 2) | {"by": "much"}

class Labelled(Pairs):
    def __init__(self, **_):
        self.items = [side("", 5, 6, 7, 2) | {"label": torch.tensor(label)} for label in (True, False)]

class Unlabelled(Pairs):
    def __init__(self, **_):
        self.items = [side("", 5, 6, 7, 2)]
"""


def load(path: Path, name: str, method: str = "reward_model", **data: Any) -> PreferenceSet:
    file = path / "mine.py"
    file.write_text(CLASSES)
    own = {"train_files": [], "dataset_class_file": str(file), "dataset_class_name": name}
    sections = {"model": {"path": "m"}, "data": own | data, "method": {"name": method}}
    config = TuneConfig.model_validate(sections)
    return load_own_preferences([], config, None, what="training")  # type: ignore[arg-type]  # the classes read no tokenizer


def test_pairs_with_a_margin_and_padding(tmp_path: Path) -> None:
    found = load(tmp_path, "Pairs", margin_column="by").rows
    assert [[text.token_ids.tolist() for text in row.sides] for row in found] == [
        [[5, 6, 7, 2], [5, 6, 8, 2]],
        [[5, 7, 2], [5, 8, 2]],
    ]
    assert np.flatnonzero(found[0].sides[0].learned).tolist() == [2, 3]
    assert np.flatnonzero(found[1].sides[0].learned).tolist() == [1, 2]
    assert [row.margin for row in found] == [0.5, 2.0]


def test_labelled_completions(tmp_path: Path) -> None:
    assert [row.desirable for row in load(tmp_path, "Labelled", "kto").rows] == [True, False]


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        ("Equal", "dpo", "item 1 of Equal has equal sides"),
        (
            "OneSide",
            "dpo",
            "item 1 of OneSide has no rejected_input_ids and no rejected_loss_mask (it has chosen_input_ids",
        ),
        (
            "OddMargin",
            "reward_model",
            "item 1 of OddMargin has a value that is wrong: it holds 'much'; a number is expected",
        ),
        ("Unlabelled", "kto", "item 0 of Unlabelled has no label"),
        ("Pairs", "kto", "item 0 of Pairs has no input_ids"),
        ("Missing", "dpo", "there is no class Missing"),
    ],
)
def test_bad_items_are_named(tmp_path: Path, name: str, method: str, message: str) -> None:
    with pytest.raises(DataError) as error:
        load(tmp_path, name, method, **({"margin_column": "by"} if name == "OddMargin" else {}))
    assert message in str(error.value)
