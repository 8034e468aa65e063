"""Asynchronous runs that are killed at random instants lose no group; async_kills.py kills them two hundred times."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("ray")
from async_kills import in_one_process, under_ray

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["colocate, refilled", "colocate, in turns", "one_step, refilled"])
def test_a_run_that_is_killed_has_the_bytes_of_one_that_is_not(kind: str, tmp_path: Path, tiny_llama: Path) -> None:
    hit, problems = in_one_process(tmp_path, tiny_llama, kind, kills=4)
    assert problems == [] and hit


def test_a_run_whose_environments_are_processes_loses_no_episode(tmp_path: Path, tiny_llama: Path) -> None:
    hit, problems = in_one_process(tmp_path, tiny_llama, "colocate, two players", kills=3)
    assert problems == [] and hit


def test_samplers_apart_lose_no_group(tmp_path: Path, tiny_llama: Path) -> None:
    hit, problems = under_ray(tmp_path, tiny_llama, "separate", kills=1)
    assert problems == [] and hit
