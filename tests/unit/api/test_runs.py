"""A run for programs: what a caller passes is checked before a file is read for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import posttrain
from posttrain.errors import RequestError


@pytest.fixture
def run(tmp_path: Path) -> posttrain.Run:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.5}) + "\n")
    (tmp_path / "run.json").write_text(json.dumps({"name": "r", "status": "finished"}))
    (tmp_path / "config.yaml").write_text("run: {name: r}\n")
    return posttrain.Run(tmp_path)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: run.metric(3), "name must be str, not int"),
        (lambda run: run.metric(["reward/mean"]), "name must be str, not list"),
        (lambda run: run.samples([1]), "step must be int, not list"),
        (lambda run: run.samples("1"), "step must be int, not str"),
        (lambda run: run.validation_samples(True), "step must be int, not bool"),
        (lambda run: run.export(None), "out must be str or Path, not NoneType"),
        (lambda run: run.export("out", step=1.5), "step must be int, not float"),
        (lambda run: run.model(step="last"), "step must be int, not str"),
    ],
)
def test_arguments_of_another_type(run: posttrain.Run, call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        call(run)


def test_the_right_types_are_read(run: posttrain.Run) -> None:
    assert run.metric("reward/mean") == {1: 0.5}
    for step in (1, np.int64(1)):
        with pytest.raises(RequestError, match="there are no samples of step 1"):
            run.samples(step)
