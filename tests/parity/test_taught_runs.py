"""Runs that learn from a teacher: the divergence falls, and a run that was stopped goes on as if it had not been."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_runs import Make, maker, metrics_of

from posttrain.build.train import train_run
from posttrain.models.tiny import write_tiny_model


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Make:
    return maker(tmp_path_factory.mktemp("taught"), tiny_llama)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "enters"), [("reverse_kl", "loss"), ("sampled_kl", "advantage")])
def test_the_student_comes_nearer_and_a_stopped_run_goes_on(
    make: Make, tmp_path: Path, tiny_llama: Path, name: str, enters: str
) -> None:
    teacher = write_tiny_model(tmp_path / "teacher", "llama", seed=7)
    sections = {
        "distillation": {"teachers": {"other": {"path": str(teacher)}}, "divergence": {"name": name}, "enters": enters},
        "loss": {},
        "policy": {"schedule": {"name": "constant"}},
        "checkpoint": {"every_steps": 1},
    }
    straight = train_run(make(f"{name} straight", run={"total_steps": 4}, **sections))
    for steps in (2, 4):
        cut = train_run(make(f"{name} cut", run={"total_steps": steps}, **sections))
    weights = "checkpoints/global_step_4/policy/model.safetensors"
    assert (straight / weights).read_bytes() == (cut / weights).read_bytes()
    lines = [line for line in metrics_of(straight) if "distillation/divergence" in line]
    assert len(lines) == 4 and all(line["time/teachers_s"] > 0 or enters == "loss" for line in lines)
    if name == "reverse_kl":  # of sampled tokens it is as random as they are
        assert 0 < lines[-1]["distillation/divergence"] < lines[0]["distillation/divergence"]
