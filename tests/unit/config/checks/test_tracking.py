"""Settings of the trackers that no chosen tracker reads are told."""

from __future__ import annotations

import pytest

from posttrain.config.checks.tracking import tracking_problems, tracking_warnings
from posttrain.config.tracking import SERVICES, TrackingConfig
from posttrain.registry import TRACKERS, is_installed


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"offline": True}, ["offline has no effect: tracking.trackers has none of wandb, swanlab"]),
        (
            {"offline": True, "trackers": ["mlflow"]},
            ["offline has no effect: tracking.trackers has none of wandb, swanlab"],
        ),
        ({"offline": True, "trackers": ["swanlab"]}, []),
        ({"proxy": "http://p", "trackers": ["swanlab"]}, ["proxy has no effect: tracking.trackers has none of wandb"]),
        (
            {"validation_samples": 3},
            ["validation_samples has no effect: tracking.trackers has none of tensorboard, wandb, mlflow, swanlab"],
        ),
        ({"validation_samples": 3, "dialect_names": "verl", "trackers": ["tensorboard"]}, []),
        ({}, []),
    ],
)
def test_what_nobody_reads_is_told(settings: dict[str, object], said: list[str]) -> None:
    config = TrackingConfig.model_validate({"trackers": ["console"]} | settings)
    assert list(tracking_warnings(config)) == [f"tracking.{text}" for text in said]


def test_what_is_written_anyway_is_no_tracker() -> None:
    [problem] = tracking_problems(TrackingConfig(trackers=["console", "jsonl"]))
    assert (problem.field, problem.fix) == ("tracking.trackers", "leave it out")
    assert list(tracking_problems(TrackingConfig(trackers=["console", "wandb"]))) == []


def test_every_service_has_its_file_and_is_named_like_its_library() -> None:
    assert set(SERVICES) == set(TRACKERS.names()) - {"console", "jsonl"}
    assert not is_installed("no_such_library")
    assert is_installed("yaml")
