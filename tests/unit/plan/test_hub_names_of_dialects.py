"""Names of the hub in the keys of every dialect, and the models that model.revision holds for."""

from __future__ import annotations

import pytest

from posttrain.dialects.detect import read_config
from posttrain.libraries.hub_names import HubName
from posttrain.plan.hub import hub_data, replace_data, replace_models


@pytest.mark.parametrize(
    ("dialect", "overrides"),
    [
        ("native", ["model.path=org/m", "data.train_files=[org/rows:train]"]),
        ("verl", ["actor_rollout_ref.model.path=org/m", "data.train_files=org/rows:train"]),
        ("skyrl", ["trainer.policy.model.path=org/m", "data.train_data=['org/rows:train']"]),
    ],
)
def test_a_data_set_is_named_in_every_dialect(dialect: str, overrides: list[str]) -> None:
    config = read_config(None, overrides, dialect).config
    assert hub_data(config)["data.train_files"] == [HubName(kind="dataset", name="org/rows", split="train")]
    assert replace_data(config, lambda wanted, field: [f"/{wanted.split}", field]).data.train_files == [
        "/train",
        "data.train_files",
    ]


def test_the_revision_holds_where_the_same_id_stands_alone() -> None:
    given = ["model.path=org/m", "model.revision=v1", "model.tokenizer_path=org/m@v2", "data.train_files=[a.jsonl]"]
    config = read_config(None, [*given, "reference.path=org/m", "loss.kl_coef=0.1"], "native").config
    found = replace_models(config, lambda wanted, field: f"/{wanted.key}")
    paths = (found.model.path, found.model.tokenizer_path, found.reference.path, found.model.revision)
    assert paths == ("/org/m@v1", "/org/m@v2", "/org/m@v1", None)
