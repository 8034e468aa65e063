"""Prompts and responses against the positions that a model was made for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.config import RunConfig
from posttrain.plan.positions import check_positions, positions_warnings


def config(folder: Path, about: Any, **sections: Any) -> RunConfig:
    (folder / "config.json").write_text(about if isinstance(about, str) else json.dumps(about))
    model = {"path": str(folder), **sections.pop("model", {})}
    data = {"train_files": ["x"], "max_prompt_tokens": 100, **sections.pop("data", {})}
    return RunConfig.model_validate({"model": model, "data": data, "rollout": {"max_response_tokens": 200}, **sections})


def test_responses_that_never_fit_are_refused(tmp_path: Path) -> None:
    (problem,) = check_positions(config(tmp_path, {"max_position_embeddings": 200}))
    assert problem.field == "rollout.max_response_tokens"
    assert str(problem).startswith("a prompt of 1 token and a response of up to 200 make 201, and the model in ")
    assert "has 200 positions" in str(problem) and "use rollout.max_response_tokens=100" in str(problem)
    assert positions_warnings(config(tmp_path, {"max_position_embeddings": 200})) == []


def test_limits_that_may_be_too_wide_are_told(tmp_path: Path) -> None:
    """100 + 200 = 300 tokens, of which 299 are there: a prompt may have 99."""
    narrow = config(tmp_path, {"max_position_embeddings": 299})
    assert check_positions(narrow) == []
    assert positions_warnings(narrow) == [
        "data.max_prompt_tokens 100 + rollout.max_response_tokens 200 = 300, and the model has 299 positions: training "
        "refuses a prompt of more than 99 tokens"
    ]
    assert positions_warnings(config(tmp_path, {"max_position_embeddings": 300})) == []


def test_longer_responses_in_validation_count_where_there_is_one(tmp_path: Path) -> None:
    about, section = {"max_position_embeddings": 310}, {"max_response_tokens": 310}
    assert check_positions(config(tmp_path, about, validation=section)) == []
    (problem,) = check_positions(config(tmp_path, about, validation=section, data={"validation_files": ["y"]}))
    assert problem.field == "validation.max_response_tokens"


@pytest.mark.parametrize(
    ("about", "overrides", "positions"),
    [
        ({"text_config": {"max_position_embeddings": 150}, "max_position_embeddings": 900}, {}, 150),
        ({"max_position_embeddings": 150}, {"max_position_embeddings": 900}, None),
        ({"max_position_embeddings": 900}, {"max_position_embeddings": 150}, 150),
        ({"text_config": {"max_position_embeddings": 900}}, {"text_config": {"max_position_embeddings": 150}}, 150),
        ({"max_position_embeddings": 150, "rope_scaling": {"type": "yarn", "factor": 8}}, {}, None),
        ({"max_position_embeddings": 150, "rope_parameters": {"rope_type": "default"}}, {}, 150),
        (
            {"max_position_embeddings": 150, "rope_parameters": {"rope_type": "default"}},
            {"rope_scaling": {"type": "yarn", "factor": 8}},
            None,
        ),
        ({"n_positions": 150}, {}, None),
        ("{", {}, None),
        ("[]", {}, None),
    ],
)
def test_what_a_model_says_of_itself(
    tmp_path: Path, about: Any, overrides: dict[str, Any], positions: int | None
) -> None:
    found = check_positions(config(tmp_path, about, model={"config_overrides": overrides}))
    assert [f"has {positions} positions" in str(problem) for problem in found] == ([True] if positions else [])


def test_a_hub_model_is_not_looked_up() -> None:
    request = RunConfig.model_validate({"model": {"path": "org/name"}, "data": {"train_files": ["x"]}})
    assert check_positions(request) == [] and positions_warnings(request) == []
