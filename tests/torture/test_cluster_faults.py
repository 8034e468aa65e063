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
    held_by,
    kill_and_go_on,
    left_behind,
    start,
    wait_until,
)
from faults import lose, sweep
from runs import PPO

pytest.importorskip("ray")
pytestmark = pytest.mark.slow


CORRECTED = {"kl_coef": 0.01, "rollout_correction": {"weights": "token"}}
ONE_STEP: dict[str, dict[str, Any]] = {"asynchronous": {"mode": "one_step"}, "loss": CORRECTED}

# Lengths of 1 to 24 tokens, so that some are unfinished in every checkpoint.
COLOCATE: dict[str, dict[str, Any]] = {
    "asynchronous": {"mode": "colocate", "max_staleness_steps": 2},
    "rollout": {"stop_token_ids": list(range(0, 256, 8))},
    "loss": CORRECTED,
}


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


def test_a_colocated_run_on_two_ranks_that_is_killed_goes_on_with_its_prefixes(
    tmp_path: Path, tiny_llama: Path
) -> None:
    """Its decisions count passes, so groups, prefixes, weights and metrics are those of a run that was left alone."""
    kills = int(os.environ.get("POSTTRAIN_KILLS", "1"))
    assert kill_and_go_on(tmp_path, tiny_llama, COLOCATE, steps=6 + 6 * kills, kills=kills, tokens=24) == []


@pytest.mark.parametrize(
    ("layout", "extra"),
    [("trainer", {}), ("rollout", ONE_STEP), ("trainer", COLOCATE)],
    ids=["synchronous", "one_step", "colocate"],
)
def test_a_signal_leaves_the_sampling_and_saves(
    layout: str, extra: dict[str, dict[str, Any]], tmp_path: Path, tiny_llama: Path
) -> None:
    run = start(tmp_path, tiny_llama, layout, "run", steps=500, extra=extra)
    try:
        wait_until(lambda: run.steps() >= 1, run, START_S)
        pids = descendants(run.process.pid)
        segments = held_by([run.process.pid, *pids])
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.process.wait(END_S) == 75, run.text()
        assert "saved" in run.text() and left_behind(pids, run.temporary, segments) == []
    finally:
        finish(run)


@pytest.mark.skipif("POSTTRAIN_TRIALS" not in os.environ, reason="a sweep: POSTTRAIN_TRIALS says how many trials")
def test_a_sweep_of_faults(tmp_path: Path, tiny_llama: Path) -> None:
    assert sweep(tmp_path, tiny_llama, int(os.environ["POSTTRAIN_TRIALS"])) == []
