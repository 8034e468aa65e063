"""Which workers record a phase, and what becomes of one that is lost meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from posttrain.backends.runtime.ray.profiling import ROLES, RayProfiler
from posttrain.config.profiling import PhaseName
from posttrain.records.plans import ProfilePlan


class WorkerGroup:
    """Workers that note what they are called with, and answer at once."""

    timeout_s = 1.0

    def __init__(self, group: str, ranks: int, calls: list[tuple[Any, ...]]):
        self.members = [Worker(f"{group} rank {rank}") for rank in range(ranks)]
        self.cluster = self.watch = self
        self._calls = calls

    def call(self, handle: str, how: str, method: str, wanted: bool, *arguments: Any) -> str:
        self._calls.append((handle, method, *arguments))
        return f"of {handle}"

    def wait(self, promises: Mapping[Any, str], what: str, timeout_s: float) -> dict[Any, list[str]]:
        return {member: [promise] for member, promise in promises.items()}


@dataclass(eq=False)
class Worker:
    """As watch.Member: another process is another worker."""

    name: str

    @property
    def handle(self) -> str:
        return self.name


@pytest.fixture
def calls() -> list[tuple[Any, ...]]:
    return []


@pytest.fixture
def worker_groups(calls: list[tuple[Any, ...]]) -> dict[str, Any]:
    trainers, samplers = WorkerGroup("trainer", 2, calls), WorkerGroup("rollout", 3, calls)
    return {"policy": trainers, "reference": trainers, "rollout": samplers}


@pytest.mark.parametrize(
    ("phase", "ranks", "asked"),
    [
        ("update", (0,), ["trainer rank 0"]),
        ("logprobs", None, ["trainer rank 0", "trainer rank 1"]),  # policy and reference share workers
        ("weight_sync", (1, 2), ["trainer rank 1", "rollout rank 1", "rollout rank 2"]),
        ("rollout", (7,), []),
        ("values", None, []),  # there is no critic
    ],
)
def test_who_records_a_phase(
    phase: str,
    ranks: tuple[int, ...] | None,
    asked: list[str],
    worker_groups: dict[str, Any],
    calls: list[tuple[Any, ...]],
) -> None:
    plan = ProfilePlan(steps=None, ranks=ranks)
    profiler = RayProfiler(worker_groups, on_cuda=False)
    profiler.begin(phase, plan)
    assert calls == [(name, "recording.begin", plan) for name in asked]
    calls.clear()
    assert profiler.end(Path("/p"), "step_1") == [f"of {name}" for name in asked]
    files = [(name, "recording.end", Path("/p"), f"step_1_{name.replace(' ', '_')}") for name in asked]
    assert calls == files


def test_a_worker_that_was_replaced_has_no_profile(worker_groups: dict[str, Any], calls: list[tuple[Any, ...]]) -> None:
    profiler = RayProfiler(worker_groups, on_cuda=False)
    profiler.begin("rollout", ProfilePlan(steps=None, ranks=(0, 1)))
    worker_groups["rollout"].members[1] = Worker("rollout rank 1")  # another process by the same name
    assert profiler.end(Path("/p"), "step_1_rollout") == [
        "of rollout rank 0",
        "rollout rank 1 was started again in step_1_rollout, which is not profiled",
    ]
    assert [call[0] for call in calls if call[1] == "recording.end"] == ["rollout rank 0"]


def test_every_phase_has_its_roles() -> None:
    assert set(ROLES) == set(PhaseName.__args__)
