"""Profiles: which phases, what is in the file, and what happens when there can be none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from posttrain.records.plans import ProfilePlan
from posttrain.run.profile import Profiler, Recording


@pytest.mark.parametrize(
    ("steps", "phases", "covered"),
    [
        ((), (), []),
        ((2,), (), [(2, "rollout"), (2, "update")]),
        (None, ("update",), [(1, "update"), (2, "update")]),
        ((1, 2), ("rollout", "values"), [(1, "rollout"), (2, "rollout")]),
    ],
)
def test_which_phases_are_covered(
    steps: tuple[int, ...] | None, phases: tuple[str, ...], covered: list[tuple[int, str]]
) -> None:
    plan = ProfilePlan(steps=steps, phases=phases)
    places = [(step, phase) for step in (1, 2) for phase in ("rollout", "update")]
    assert [place for place in places if plan.covers(*place)] == covered


def test_a_phase_becomes_a_chrome_trace(tmp_path: Path) -> None:
    told: list[str] = []
    profiler = Profiler(ProfilePlan(steps=(3,), shapes=True), tmp_path, told.append)
    for _ in range(2):  # a step may have a phase twice
        with profiler.phase(3, "update"):
            torch.ones(3, 4) @ torch.ones(4, 5)
    with profiler.phase(4, "update"):
        pass
    names = ["step_3_update.json.gz", "step_3_update_2.json.gz"]
    assert sorted(path.name for path in (tmp_path / "profiles").iterdir()) == names
    assert told == [f"profiled: {tmp_path / 'profiles' / name}" for name in names]
    trace = json.loads(gzip.decompress((tmp_path / "profiles" / names[1]).read_bytes()))
    [product] = [event for event in trace["traceEvents"] if event.get("name") == "aten::mm"]
    assert product["args"]["Input Dims"][:2] == [[3, 4], [4, 5]]


def test_a_phase_that_fails_leaves_no_profile_and_keeps_its_error(tmp_path: Path) -> None:
    profiler = Profiler(ProfilePlan(steps=None), tmp_path, print)
    with pytest.raises(ValueError, match="inside"), profiler.phase(1, "update"):
        raise ValueError("inside")
    assert not (tmp_path / "profiles").exists()
    with profiler.phase(1, "rollout"):  # torch's profiler is free again
        pass
    assert (tmp_path / "profiles" / "step_1_rollout.json.gz").is_file()


class Workers:
    """Other processes, of which this one remembers what they were asked."""

    on_cuda = True

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    def begin(self, phase: str, plan: ProfilePlan) -> None:
        self.asked.append((phase, plan.ranks))

    def end(self, folder: Path, stem: str) -> list[str]:
        self.asked.append((folder, stem))
        return [f"profiled: worker 0 of {stem}"]


def test_workers_record_the_same_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their folder is an absolute one; and their devices have memory to be seen, though this process has none."""
    monkeypatch.chdir(tmp_path)
    told: list[str] = []
    workers = Workers()
    plan = ProfilePlan(steps=(3,), phases=("update",), ranks=(0, 2), memory=True)
    profiler = Profiler(plan, Path("run"), told.append, workers)
    for step, phase in ((2, "update"), (3, "rollout"), (3, "update")):
        with profiler.phase(step, phase):
            pass
    assert workers.asked == [("update", (0, 2)), (tmp_path / "run" / "profiles", "step_3_update")]
    assert told == [
        f"profiled: {tmp_path}/run/profiles/step_3_update.json.gz",
        "profiled: worker 0 of step_3_update",
    ]
    with pytest.raises(ValueError, match="inside"), profiler.phase(3, "update"):
        raise ValueError("inside")
    assert len(workers.asked) == 3  # begun, and not ended


def test_a_recording_begun_anew_drops_what_it_had(tmp_path: Path) -> None:
    recording = Recording()
    recording.begin(ProfilePlan())
    torch.ones(3, 4) @ torch.ones(4, 5)
    recording.begin(ProfilePlan())
    torch.ones(3).sum()
    assert recording.end(tmp_path, "second") == [f"profiled: {tmp_path / 'second.json.gz'}"]
    names = {
        event.get("name")
        for event in json.loads(gzip.decompress((tmp_path / "second.json.gz").read_bytes()))["traceEvents"]
    }
    assert "aten::sum" in names and "aten::mm" not in names
    assert recording.end(tmp_path, "third") == []  # nothing was begun


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "profiles").write_text("a file")
    told: list[str] = []
    with Profiler(ProfilePlan(steps=None), tmp_path, told.append).phase(1, "update"):
        pass
    assert len(told) == 1 and "step_1_update.json.gz could not be written" in told[0]


def test_memory_without_a_gpu_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told: list[str] = []
    plan = ProfilePlan(steps=(1,), operators=False, memory=True, folder=tmp_path / "elsewhere")
    with Profiler(plan, tmp_path, told.append).phase(1, "update"):
        pass
    assert told == ["profiling.memory has no effect: torch sees no CUDA device on this machine"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_memory_of_a_gpu(tmp_path: Path) -> None:
    plan = ProfilePlan(steps=(1,), memory=True)
    with Profiler(plan, tmp_path, print).phase(1, "update"):
        torch.ones(1024, 1024, device="cuda").sum()
    assert (tmp_path / "profiles" / "step_1_update.memory.pickle").stat().st_size > 1000
    assert (tmp_path / "profiles" / "step_1_update.json.gz").is_file()
