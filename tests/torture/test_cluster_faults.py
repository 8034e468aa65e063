"""Workers of a run are killed and stopped, one trial of each kind. A sweep at random instants:

POSTTRAIN_TRIALS=20 python -m pytest -m slow tests/torture/test_cluster_faults.py -k sweep
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from cluster import (
    END_S,
    START_S,
    descendants,
    finish,
    kill_and_go_on,
    left_behind,
    shared_memory,
    start,
    wait_until,
)
from faults import lose, sweep
from runs import PPO

pytest.importorskip("ray")
pytestmark = pytest.mark.slow


CORRECTED = {"kl_coef": 0.01, "rollout_correction": {"weights": "token"}}
ONE_STEP: dict[str, dict[str, Any]] = {"asynchronous": {"mode": "one_step"}, "loss": CORRECTED}


@pytest.mark.parametrize("kind", ["trainer", "sampler"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_a_lost_worker(kind: str, how: signal.Signals, tmp_path: Path, tiny_llama: Path) -> None:
    assert lose(tmp_path, tiny_llama, kind, how, "run", 0.3, compare=False) == []


ESTIMATORS = {"ppo": PPO} | ({"grpo": {}} if "POSTTRAIN_KILLS" in os.environ else {})


@pytest.mark.parametrize("extra", ESTIMATORS.values(), ids=ESTIMATORS)
def test_a_run_on_two_ranks_that_is_killed_goes_on_as_if_it_had_not_been(
    extra: dict[str, dict[str, Any]], tmp_path: Path, tiny_llama: Path
) -> None:
    """One kill of a run with a critic; POSTTRAIN_KILLS=10 for more, and without one too."""
    kills = int(os.environ.get("POSTTRAIN_KILLS", "1"))
    assert kill_and_go_on(tmp_path, tiny_llama, extra, steps=6 + 6 * kills, kills=kills) == []


@pytest.mark.parametrize(("layout", "extra"), [("trainer", {}), ("rollout", ONE_STEP)], ids=["synchronous", "one_step"])
def test_a_signal_leaves_the_sampling_and_saves(
    layout: str, extra: dict[str, dict[str, Any]], tmp_path: Path, tiny_llama: Path
) -> None:
    before = shared_memory()
    run = start(tmp_path, tiny_llama, layout, "run", steps=500, extra=extra)
    try:
        wait_until(lambda: run.steps() >= 1, run, START_S)
        pids = descendants(run.process.pid)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.process.wait(END_S) == 75, run.text()
        assert "saved" in run.text() and left_behind(pids, run.temporary, before) == []
    finally:
        finish(run)


@pytest.mark.skipif("POSTTRAIN_TRIALS" not in os.environ, reason="a sweep: POSTTRAIN_TRIALS says how many trials")
def test_a_sweep_of_faults(tmp_path: Path, tiny_llama: Path) -> None:
    assert sweep(tmp_path, tiny_llama, int(os.environ["POSTTRAIN_TRIALS"])) == []
