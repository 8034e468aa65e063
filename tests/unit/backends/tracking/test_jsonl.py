"""metrics.jsonl: strict JSON, one line per step, and what a killed run leaves behind."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from posttrain.backends.tracking.jsonl import Jsonl
from posttrain.config import RunConfig
from posttrain.errors import RunStopped
from posttrain.registry import TRACKERS

CONFIG = RunConfig.model_validate({"model": {"path": "m"}, "data": {"train_files": ["t.parquet"]}})


def begin(folder: Path, first_step: int = 1) -> Jsonl:
    tracker = Jsonl(folder)
    tracker.begin(CONFIG, total_steps=10, first_step=first_step)
    return tracker


def steps_in(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_jsonl_is_found_by_name() -> None:
    assert TRACKERS.get("jsonl") is Jsonl


def test_jsonl_sorts_keys_and_flushes_each_line(tmp_path: Path) -> None:
    tracker = begin(tmp_path)
    tracker.log(0, {"validation/sum/accuracy": 0.25})
    tracker.log(1, {"reward/mean": 0.5, "gap/max": 0.125, "step/prompts": 8})
    # Read while still open: a line is on disk once log() returns.
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 0, "validation/sum/accuracy": 0.25}\n'
        '{"gap/max": 0.125, "reward/mean": 0.5, "step": 1, "step/prompts": 8}\n'
    )
    tracker.close()
    tracker.close()


def test_jsonl_writes_numbers_that_are_not_finite_as_null_and_names_them(tmp_path: Path) -> None:
    tracker = begin(tmp_path)
    tracker.log(1, {"policy/loss": math.nan, "reward/mean": 1.0, "policy/grad_norm": math.inf})
    tracker.close()

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert row == {
        "step": 1,
        "reward/mean": 1.0,
        "policy/loss": None,
        "policy/grad_norm": None,
        "nonfinite": ["policy/grad_norm", "policy/loss"],
    }


def test_jsonl_resume_cuts_the_steps_that_will_run_again(tmp_path: Path) -> None:
    tracker = begin(tmp_path)
    for step in range(6):
        tracker.log(step, {"reward/mean": step / 10})
    tracker.close()
    tracker = begin(tmp_path, first_step=4)
    assert steps_in(tmp_path) == [0, 1, 2, 3]
    tracker.log(4, {"reward/mean": 0.9})
    tracker.close()
    assert steps_in(tmp_path) == [0, 1, 2, 3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]


@pytest.mark.parametrize("end", ['{"reward/mean": 0.3, "st', '{"reward/mean": 0.3, "step": 3', "", "\x00\x00\x00"])
def test_jsonl_resume_tolerates_a_half_written_last_line(tmp_path: Path, end: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n' + end)
    tracker = begin(tmp_path, first_step=4)
    tracker.log(4, {"reward/mean": 0.5})
    tracker.close()
    assert steps_in(tmp_path) == [1, 2, 4]


def test_jsonl_restart_from_the_first_step_starts_the_file_anew(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    begin(tmp_path, first_step=1).close()
    assert steps_in(tmp_path) == []


def test_jsonl_makes_the_run_folder(tmp_path: Path) -> None:
    begin(tmp_path / "runs" / "new").close()
    assert (tmp_path / "runs" / "new" / "metrics.jsonl").exists()


def test_jsonl_log_before_begin_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="between begin"):
        Jsonl(tmp_path).log(1, {})


def test_a_file_that_is_gone_stops_the_run(tmp_path: Path) -> None:
    """The system goes on writing into a deleted file, and nothing of it is kept."""
    tracker = begin(tmp_path / "run")
    tracker.log(1, {"reward/mean": 0.5})
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "run").mkdir()  # as the next samples make it
    with pytest.raises(RunStopped, match=r"run/metrics.jsonl is gone: it, or its folder, was moved or deleted"):
        tracker.log(2, {"reward/mean": 0.5})
    tracker.close()
