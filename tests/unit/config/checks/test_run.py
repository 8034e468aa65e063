"""What a request says about its checkpoints that cannot be, or does nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.config import RunConfig, SftConfig
from posttrain.plan.checks.sft import check as check_sft
from posttrain.plan.checks.train import check, warnings_of
from posttrain.plan.files import check_run_files


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "x"}, "data": {"train_files": ["x"]}, **sections})


def test_the_best_by_no_metric() -> None:
    (problem,) = check(config(checkpoint={"keep_last": 1, "keep_best": 1}))
    assert problem.field == "checkpoint.keep_best"
    assert "such as checkpoint.best_metric=reward/mean" in str(problem)
    assert check(config(checkpoint={"keep_last": 1, "keep_best": 1, "best_metric": "reward/mean"})) == []


@pytest.mark.parametrize("name", ["..", "../x", "a/../../x", "a/..", "/", "."])
def test_a_name_that_leads_elsewhere(name: str) -> None:
    (problem,) = check(config(run={"name": name}))
    assert problem.field == "run.name"
    assert str(problem).endswith("use a name without .., and run.folder for another place")
    sft = SftConfig.model_validate({"model": {"path": "x"}, "data": {"train_files": ["x"]}, "run": {"name": name}})
    assert check_sft(sft) == [problem]


@pytest.mark.parametrize("name", ["a", "team/a", "a..b", "/a", "./a", "..."])
def test_a_name_may_have_parts(name: str) -> None:
    assert check(config(run={"name": name})) == []
    assert Path(config(run={"name": name}).folder).resolve().is_relative_to(Path("runs").resolve())


def test_never_resuming_from_a_path() -> None:
    (problem,) = check(config(run={"resume": "never", "resume_path": "x"}))
    assert problem.field == "run.resume_path"


def test_rules_without_effect_are_told() -> None:
    rules = {"keep_every": 5, "keep_best": 2, "best_metric": "reward/mean"}
    said = [line for line in warnings_of(config(checkpoint=rules)) if line.startswith("checkpoint.")]
    assert said == [
        "checkpoint.keep_best has no effect: checkpoint.keep_last is null, so all are kept",
        "checkpoint.keep_every has no effect: checkpoint.keep_last is null, so all are kept",
    ]
    (line,) = [line for line in warnings_of(config(checkpoint={"best_metric": "m"})) if line.startswith("checkpoint.")]
    assert line == "checkpoint.best_metric has no effect: checkpoint.keep_best is null"


def test_parts_that_an_engine_does_not_write() -> None:
    sharded = {"checkpoint": {"sharded": True}, "placement": {"devices": 2}}
    (problem,) = check(config(policy={"engine": "deepspeed"}, **sharded))
    assert problem.field == "checkpoint.sharded" and "policy.engine=fsdp" in str(problem)
    critic = {"engine": "deepspeed"}
    assert check(config(critic=critic, policy={"engine": "fsdp"}, **sharded)) == []  # there is none
    (problem,) = check(config(advantage={"name": "gae"}, critic=critic, policy={"engine": "fsdp"}, **sharded))
    assert "critic.engine=fsdp" in str(problem)


def test_parts_of_an_adapter_are_told() -> None:
    said = warnings_of(config(checkpoint={"sharded": True}, policy={"lora": {"rank": 2}}))
    assert (
        "checkpoint.sharded has no effect on the policy: its adapter is small, and the first process writes it" in said
    )
    assert not any("sharded" in line for line in warnings_of(config(checkpoint={"sharded": True})))


def test_settings_of_uploads_and_exports_that_do_nothing_are_told() -> None:
    section = {"upload_keep_last": 2, "upload_wait_s": 5, "export_folder": "x"}
    said = [line for line in warnings_of(config(checkpoint=section)) if line.startswith("checkpoint.")]
    assert said == [
        "checkpoint.upload_keep_last has no effect: checkpoint.upload is null",
        "checkpoint.upload_wait_s has no effect: checkpoint.upload is null",
        "checkpoint.export_folder has no effect: checkpoint.export_every_steps is null",
    ]
    used = section | {"upload": "s3://store/run", "export_every_steps": 5}
    assert not [line for line in warnings_of(config(checkpoint=used)) if line.startswith("checkpoint.")]


def test_uploads_go_elsewhere(tmp_path: Path) -> None:
    for target in (f"{tmp_path}/run/checkpoints/", f"file://{tmp_path}/run/checkpoints"):
        request = config(run={"folder": str(tmp_path / "run")}, checkpoint={"upload": target})
        (problem,) = [one for one in check_run_files(request) if one.field == "checkpoint.upload"]
        assert problem.what.endswith("is where the run's own checkpoints are")
    request = config(run={"resume_path": "s33://x/y"}, checkpoint={"upload": "memory://x"})
    found = {problem.field: problem.what for problem in check_run_files(request)}
    assert found["run.resume_path"] == "s33:// is not known" and "checkpoint.upload" not in found


def test_folders_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    request = config(
        run={"folder": str(tmp_path / "run"), "resume_path": str(tmp_path / "gone")},
        checkpoint={"folder": str(tmp_path / "file")},
    )
    problems = {problem.field: str(problem) for problem in check_run_files(request)}
    assert problems["run.resume_path"] == f"there is no folder {tmp_path / 'gone'}"
    assert problems["checkpoint.folder"].endswith("a run writes into a folder; name another checkpoint.folder")
