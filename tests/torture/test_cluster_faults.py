"""Workers of a run are killed and stopped, one trial of each kind. A sweep at random instants:

POSTTRAIN_TRIALS=20 python -m pytest -m slow tests/torture/test_cluster_faults.py -k sweep
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from cluster import (
    END_S,
    START_S,
    alive,
    descendants,
    finish,
    kill_and_go_on,
    left_behind,
    lose_a_sampler,
    lose_a_trainer,
    start,
    sweep,
)
from runs import PPO

pytest.importorskip("ray")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_a_lost_trainer_is_named_and_ends_the_run(how: signal.Signals, tmp_path: Path, tiny_llama: Path) -> None:
    assert lose_a_trainer(tmp_path, tiny_llama, how, "run", 0.3) == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_a_lost_sampler_is_replaced_and_the_run_ends_well(
    how: signal.Signals, tmp_path: Path, tiny_llama: Path
) -> None:
    assert lose_a_sampler(tmp_path, tiny_llama, how, "run", 0.1) == []


@pytest.mark.parametrize("extra", [{}, PPO], ids=["grpo", "ppo"])
def test_a_run_on_two_ranks_that_is_killed_goes_on_as_if_it_had_not_been(
    extra: dict[str, dict[str, Any]], tmp_path: Path, tiny_llama: Path
) -> None:
    """Three kills; POSTTRAIN_KILLS=10 for more."""
    kills = int(os.environ.get("POSTTRAIN_KILLS", "3"))
    assert kill_and_go_on(tmp_path, tiny_llama, extra, steps=6 * kills, kills=kills) == []


def test_nothing_outlives_a_driver_that_is_killed(tmp_path: Path, tiny_llama: Path) -> None:
    run = start(tmp_path, tiny_llama, "trainer", "run", steps=500)
    try:
        until = time.monotonic() + START_S
        while run.steps() < 1:
            assert run.process.poll() is None and time.monotonic() < until, run.text()
            time.sleep(0.05)
        pids = descendants(run.process.pid)
        assert len(alive(pids)) > 3
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait(END_S)
        # Ray's agents look for their parent now and then. Files stay: nobody is left to delete them.
        assert [each for each in left_behind(pids, run.temporary, timeout_s=90.0) if each[0].isdigit()] == []
    finally:
        finish(run)


def test_a_signal_leaves_the_sampling_and_saves(tmp_path: Path, tiny_llama: Path) -> None:
    run = start(tmp_path, tiny_llama, "trainer", "run", steps=500)
    try:
        until = time.monotonic() + START_S
        while run.steps() < 1:
            assert run.process.poll() is None and time.monotonic() < until, run.text()
            time.sleep(0.05)
        pids = descendants(run.process.pid)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.process.wait(END_S) == 75, run.text()
        assert "saved" in run.text() and left_behind(pids, run.temporary) == []
    finally:
        finish(run)


@pytest.mark.skipif("POSTTRAIN_TRIALS" not in os.environ, reason="a sweep: POSTTRAIN_TRIALS says how many trials")
def test_a_sweep_of_faults(tmp_path: Path, tiny_llama: Path) -> None:
    assert sweep(tmp_path, tiny_llama, int(os.environ["POSTTRAIN_TRIALS"])) == []
