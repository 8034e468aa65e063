"""What is said about profiles that record nothing, or a part of a run that it does not have."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from posttrain.config import RunConfig, SftConfig
from posttrain.config.checks.profiling import profiling_warnings

NEEDED: dict[str, Any] = {"model": {"path": "m"}, "data": {"train_files": ["a.jsonl"]}}


def warnings(kind: type[RunConfig] | type[SftConfig] = RunConfig, /, **sections: dict[str, Any]) -> list[str]:
    return list(profiling_warnings(kind.model_validate(NEEDED | sections)))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({}, []),
        ({"profiling": {"steps": [2], "phases": ["rollout", "update"]}, "run": {"total_steps": 2}}, []),
        ({"profiling": {"steps": "all"}, "run": {"total_steps": 2}}, []),
        ({"profiling": {"memory": True}}, ["profiling.memory has no effect: profiling.steps is empty"]),
        (
            {"profiling": {"steps": [1], "operators": False}},
            ["profiling.operators and profiling.memory are both false"],
        ),
        (
            {"profiling": {"steps": [1], "operators": False, "memory": True, "stacks": True}},
            ["profiling.stacks has no effect: profiling.operators is false"],
        ),
        ({"profiling": {"steps": [1], "memory": True}, "placement": {"device": "cpu"}}, ["placement.device is cpu"]),
        ({"profiling": {"steps": [1], "ranks": [0, 1]}, "placement": {"devices": 2}}, []),
        ({"profiling": {"steps": [1], "ranks": "all"}}, []),
        ({"profiling": {"steps": [1], "ranks": [1]}}, ["profiling.ranks has no effect: this run is one process"]),
        (
            {"profiling": {"steps": [1], "ranks": [1, 2, 3]}, "placement": {"devices": 2}},
            ["the run has 2 devices, so no worker of rank 2, 3"],
        ),
        ({"profiling": {"steps": [1, 8, 9]}, "run": {"total_steps": 5}}, ["the run ends at step 5, before 8, 9"]),
        (
            {"profiling": {"steps": [1], "phases": ["values", "update", "validation"]}},
            ["this run has no phase called values, validation"],
        ),
        ({"profiling": {"steps": [1], "phases": ["values"]}, "advantage": {"name": "gae"}}, []),
        ({"profiling": {"steps": [1], "phases": ["baseline"]}, "advantage": {"name": "remax"}}, []),
    ],
)
def test_what_is_said(sections: dict[str, Any], said: list[str]) -> None:
    found = warnings(**sections)
    assert len(found) == len(said)
    assert all(part in text for part, text in zip(said, found, strict=True))


def test_supervised_runs_have_two_phases() -> None:
    [said] = warnings(SftConfig, profiling={"steps": [1], "phases": ["update", "validation_loss", "rollout"]})
    assert said == "profiling.phases: this run has no phase called rollout"


@pytest.mark.parametrize("profiling", [{"steps": [-1]}, {"steps": "some"}, {"phases": ["training"]}, {"step": [1]}])
def test_what_cannot_be_meant_is_refused(profiling: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RunConfig.model_validate(NEEDED | {"profiling": profiling})
