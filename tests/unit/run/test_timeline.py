"""timeline.jsonl: a line per phase, whatever happens in it, and none twice after a resume."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from posttrain.records.plans import ProfilePlan
from posttrain.run.clock import Clock
from posttrain.run.profile import Profiler
from posttrain.run.step_ends import end_step
from posttrain.run.stopping import StopSignal
from posttrain.run.timeline import Timeline
from posttrain.run.trackers import Trackers


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "timeline.jsonl").read_text().splitlines()]


def test_phases_are_written_as_they_end(tmp_path: Path) -> None:
    began = time.time()
    clock = Clock(Trackers([], []), 3, timeline=Timeline(tmp_path, 1, print))
    with clock.phase("rollout"):
        time.sleep(0.02)
        assert lines(tmp_path) == []
    with pytest.raises(ValueError, match="in between"), clock.phase("reward"):
        raise ValueError("in between")
    rollout, reward = lines(tmp_path)
    assert (rollout["step"], rollout["phase"], reward["phase"]) == (3, "rollout", "reward")
    assert began - 0.01 <= rollout["start_s"] and rollout["end_s"] <= reward["start_s"] + 0.001
    seconds = clock.metrics()["time/rollout_s"]
    assert rollout["end_s"] - rollout["start_s"] == pytest.approx(seconds, abs=2e-4)  # rounded to 4 decimals


def test_a_run_that_goes_on_writes_its_steps_again(tmp_path: Path) -> None:
    first = Timeline(tmp_path, 1, print)
    for step in (1, 2, 3):
        first.add(step, "update", 10.0 * step, 10.0 * step + 1)
    with (tmp_path / "timeline.jsonl").open("a") as file:
        file.write('{"step": 4, "pha')  # killed here
    Timeline(tmp_path, 3, print).add(3, "update", 50.0, 51.5)
    assert lines(tmp_path) == [
        {"step": 1, "phase": "update", "start_s": 10.0, "end_s": 11.0},
        {"step": 2, "phase": "update", "start_s": 20.0, "end_s": 21.0},
        {"step": 3, "phase": "update", "start_s": 50.0, "end_s": 51.5},
    ]
    Timeline(tmp_path, 1, print)  # begun anew
    assert lines(tmp_path) == []


def test_a_place_that_cannot_be_written_is_told_once_and_ends_nothing(tmp_path: Path) -> None:
    told: list[str] = []
    timeline = Timeline(tmp_path, 1, told.append)
    (tmp_path / "timeline.jsonl").unlink()
    (tmp_path / "timeline.jsonl").mkdir()
    timeline.add(1, "update", 1.0, 2.0)
    timeline.add(1, "rollout", 2.0, 3.0)
    assert told == ["timeline.jsonl ends here, because it cannot be written: Is a directory"]


def test_the_clock_profiles_the_phases_that_are_asked_for(tmp_path: Path) -> None:
    profiler = Profiler(ProfilePlan(steps=(3,), phases=("update",)), tmp_path, lambda text: None)
    for step in (2, 3):
        clock = Clock(Trackers([], []), step, profiler=profiler)
        for phase in ("rollout", "update"):
            with clock.phase(phase):
                pass
    assert [path.name for path in (tmp_path / "profiles").iterdir()] == ["step_3_update.json.gz"]


def test_a_save_is_in_the_timeline(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path, 1, print)
    rest = {"trackers": Trackers([], []), "stop": StopSignal(), "last": False, "timeline": timeline}

    def save(step: int, background: bool) -> str:
        time.sleep(0.01)
        return f"global_step_{step}"

    end_step(1, save, save_due=False, **rest)
    end_step(2, save, save_due=True, **rest)
    [line] = lines(tmp_path)
    assert (line["step"], line["phase"]) == (2, "checkpoint") and line["end_s"] - line["start_s"] >= 0.009


def test_the_line_of_a_save_that_a_kill_has_left_out_is_added(tmp_path: Path) -> None:
    Timeline(tmp_path, 1, print).add(4, "update", 40.0, 41.0)  # then it saved, and was killed
    save = {"step": 4, "phase": "checkpoint", "start_s": 41.0, "end_s": 41.5}
    for _ in range(2):  # once
        Timeline(tmp_path, 5, print, saved_s=41.5)
        assert lines(tmp_path) == [{"step": 4, "phase": "update", "start_s": 40.0, "end_s": 41.0}, save]
    (tmp_path / "timeline.jsonl").unlink()
    Timeline(tmp_path, 5, print, saved_s=41.5)
    assert lines(tmp_path) == [save | {"start_s": 41.5}]
