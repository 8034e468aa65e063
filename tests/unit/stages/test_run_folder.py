"""What a run folder says about its run, and whom it lets in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.config import RunConfig
from posttrain.errors import ConfigError
from posttrain.stages.run_folder import RunFolder


def config(tmp_path: Path, *, model: str = "a", lr: float = 1e-5, resume: str = "auto") -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": model},
            "data": {"train_files": "train.parquet"},
            "run": {"folder": str(tmp_path / "run"), "resume": resume},
            "policy": {"optimizer": {"lr": lr}},
        }
    )


def test_refused_run_writes_nothing(tmp_path: Path) -> None:
    RunFolder(config(tmp_path)).check(holds_checkpoint=False)
    assert not (tmp_path / "run").exists()


def test_changes_are_told_and_the_earlier_configuration_is_kept(tmp_path: Path) -> None:
    assert RunFolder(config(tmp_path)).begin(first_step=1, total_steps=9, device="cpu") == []
    earlier = (tmp_path / "run/config.yaml").read_text()
    again = RunFolder(config(tmp_path, lr=2e-5))
    assert again.begin(first_step=4, total_steps=9, device="cpu") == ["policy.optimizer.lr 1e-05 -> 2e-05"]
    assert (tmp_path / "run/config.until_step_3.yaml").read_text() == earlier
    assert (tmp_path / "run/config.yaml").read_text() != earlier


def test_going_on_unchanged_keeps_no_copy(tmp_path: Path) -> None:
    RunFolder(config(tmp_path)).begin(first_step=1, total_steps=9, device="cpu")
    assert RunFolder(config(tmp_path)).begin(first_step=4, total_steps=9, device="cpu") == []
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["config.yaml", "run.json"]


def test_another_model_does_not_go_on_with_the_weights_of_this_one(tmp_path: Path) -> None:
    RunFolder(config(tmp_path)).begin(first_step=1, total_steps=9, device="cpu")
    other = RunFolder(config(tmp_path, model="b"))
    other.check(holds_checkpoint=False)  # nothing to go on from: it starts over
    with pytest.raises(ConfigError, match="started from a, and would go on with that run's weights"):
        other.check(holds_checkpoint=True)


def test_resume_never_refuses_a_used_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="already holds a run; name another"):
        RunFolder(config(tmp_path, resume="never")).check(holds_checkpoint=False)


def test_run_json_says_how_it_ended(tmp_path: Path) -> None:
    folder = RunFolder(config(tmp_path))
    folder.begin(first_step=1, total_steps=9, device="cpu")
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "running"
    folder.end("done")
    about = json.loads((tmp_path / "run/run.json").read_text())
    assert (about["status"], about["total_steps"], about["device"]) == ("done", 9, "cpu")
    assert set(about["versions"]) == {"posttrain", "python", "torch", "transformers"}


def test_finished_run_without_a_checkpoint_is_not_written_over(tmp_path: Path) -> None:
    folder = RunFolder(config(tmp_path))
    folder.begin(first_step=1, total_steps=9, device="cpu")
    folder.end("failed")
    RunFolder(config(tmp_path)).check(holds_checkpoint=False)  # nothing worth keeping: it may start over
    folder.end("done")
    with pytest.raises(ConfigError, match="finished run without a checkpoint to go on from; name another"):
        RunFolder(config(tmp_path)).check(holds_checkpoint=False)


def test_another_critic_does_not_go_on_with_the_weights_of_this_one(tmp_path: Path) -> None:
    def ppo(critic: str | None) -> RunConfig:
        tree = config(tmp_path).model_dump(mode="json")
        return RunConfig.model_validate(tree | {"advantage": {"name": "gae"}, "critic": {"path": critic}})

    RunFolder(ppo(None)).begin(first_step=1, total_steps=9, device="cpu")
    RunFolder(ppo(None)).check(holds_checkpoint=True)
    other = RunFolder(ppo("b"))
    other.check(holds_checkpoint=False)
    with pytest.raises(ConfigError, match=r"a run whose critic started from the policy, .* or the same critic\.path"):
        other.check(holds_checkpoint=True)
    tree = ppo("b").model_dump(mode="json") | {"advantage": {"name": "grpo"}}
    RunFolder(RunConfig.model_validate(tree)).check(holds_checkpoint=True)  # without a critic its path says nothing
