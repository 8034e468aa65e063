"""Checkpoints are whole or absent, and the newest whole one is found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RequestError
from posttrain.stages import checkpoint
from posttrain.stages.checkpoint import Checkpoints, damage_of, resolve_checkpoint
from posttrain.stages.export import export_checkpoint


class FakePolicy:
    """Its state is one number, in one file among others."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def save(self, folder: Path) -> None:
        assert list(folder.iterdir()) == []
        (folder / "model.safetensors").write_text(str(self.value))
        (folder / "config.json").write_text("{}")
        (folder / "optimizer.safetensors").write_text("averages")
        (folder / "engine.json").write_text("{}")

    def load(self, folder: Path) -> None:
        self.value = int((folder / "model.safetensors").read_text())


class FakeLoader:
    def __init__(self, position: int = 0) -> None:
        self.position = position

    def state(self) -> Mapping[str, Any]:
        return {"position": self.position}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


def save(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.save(step, FakePolicy(100 + step), FakeLoader(step))  # type: ignore[arg-type]


def restore(checkpoints: Checkpoints) -> tuple[int, int, int, list[str]]:
    """Step, policy, data position, and what was said."""
    policy, loader, said = FakePolicy(), FakeLoader(), []
    step = checkpoints.restore(policy, loader, said.append)  # type: ignore[arg-type]
    return step, policy.value, loader.position, said


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "run" / "checkpoints")


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir())


def test_nothing_saved_restores_nothing(checkpoints: Checkpoints) -> None:
    assert restore(checkpoints) == (0, 0, 0, [])
    assert checkpoints.newest_name() is None


def test_newest_step_is_restored_by_number_not_by_name(checkpoints: Checkpoints) -> None:
    save(checkpoints, 2, 9, 10)
    assert restore(checkpoints) == (10, 110, 10, [])
    assert (checkpoints.folder / "latest").read_text() == "global_step_10\n"
    assert names(checkpoints) == ["global_step_10", "global_step_2", "global_step_9", "latest"]


def damage_content(folder: Path) -> None:
    (folder / "policy/model.safetensors").write_text("998")  # as long as before


def damage_size(folder: Path) -> None:
    (folder / "policy/model.safetensors").write_text("")


def damage_missing(folder: Path) -> None:
    (folder / "policy/config.json").unlink()


def damage_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"files"')


def damage_no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


DAMAGE = {
    damage_content: "policy/model.safetensors has changed",
    damage_size: "policy/model.safetensors has 0 bytes, not 3",
    damage_missing: "policy/config.json is missing",
    damage_manifest: "no readable manifest.json",
    damage_no_manifest: "no readable manifest.json",
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.items())
def test_damaged_checkpoint_is_named_and_passed_over(checkpoints: Checkpoints, damage: Any, reason: str) -> None:
    save(checkpoints, 3, 6)
    damage(checkpoints.folder / "global_step_6")
    step, value, position, said = restore(checkpoints)
    assert (step, value, position) == (3, 103, 3)
    assert said == [f"checkpoint global_step_6 is damaged ({reason}); trying the one before"]
    assert checkpoints.newest_name() == "global_step_3"


def test_run_whose_checkpoints_are_all_damaged_does_not_start_over_by_itself(checkpoints: Checkpoints) -> None:
    save(checkpoints, 3, 6)
    damage_content(checkpoints.folder / "global_step_3")
    damage_content(checkpoints.folder / "global_step_6")
    with pytest.raises(RequestError, match=r"every checkpoint in .* is damaged; put back a copy, or name another"):
        restore(checkpoints)


def test_death_while_saving_leaves_the_one_before(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    save(checkpoints, 3)

    def die(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_manifest", die)
        with pytest.raises(OSError, match="No space left"):
            save(checkpoints, 6)
    assert restore(checkpoints) == (3, 103, 3, [])
    assert (checkpoints.folder / "latest").read_text() == "global_step_3\n"
    save(checkpoints, 6)  # what was left behind is in nobody's way
    assert names(checkpoints) == ["global_step_3", "global_step_6", "latest"]


def test_saving_a_step_again_replaces_it(checkpoints: Checkpoints) -> None:
    save(checkpoints, 3)
    checkpoints.save(3, FakePolicy(7), FakeLoader(8))  # type: ignore[arg-type]
    assert restore(checkpoints) == (3, 7, 8, [])


def test_older_checkpoints_are_dropped(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    save(checkpoints, 1, 2, 3, 10)
    assert names(checkpoints) == ["global_step_10", "global_step_3", "latest"]


def test_damaged_later_checkpoint_does_not_push_out_what_a_resumed_run_saves(tmp_path: Path) -> None:
    """Step 6 is damaged, the run goes on from 3 and saves 4: that one has to stay."""
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    save(checkpoints, 3)
    shutil.copytree(tmp_path / "global_step_3", tmp_path / "global_step_6")
    damage_content(tmp_path / "global_step_6")
    save(checkpoints, 4)
    assert restore(checkpoints)[0] == 4


# ------------------------------------------------------------------------------------------------ naming a checkpoint


def test_checkpoint_is_found_from_the_run_its_folder_or_itself(checkpoints: Checkpoints) -> None:
    save(checkpoints, 3, 6)
    newest = checkpoints.folder / "global_step_6"
    assert resolve_checkpoint(checkpoints.folder.parent) == newest
    assert resolve_checkpoint(checkpoints.folder) == newest
    assert resolve_checkpoint(checkpoints.folder / "global_step_3") == checkpoints.folder / "global_step_3"
    damage_content(newest)
    assert resolve_checkpoint(checkpoints.folder.parent) == checkpoints.folder / "global_step_3"
    with pytest.raises(RequestError, match=r"is damaged: policy/model\.safetensors has changed; use another one"):
        resolve_checkpoint(newest)


def test_folder_without_a_checkpoint(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(RequestError, match="there is no checkpoint in"):
            resolve_checkpoint(path)


def test_manifest_lists_every_file(checkpoints: Checkpoints) -> None:
    save(checkpoints, 3)
    folder = checkpoints.folder / "global_step_3"
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    present = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {"manifest.json"}
    assert set(listed) == present
    assert damage_of(folder) is None


# ----------------------------------------------------------------------------------------------------------- export


def test_export_takes_the_model_without_the_engines_files(checkpoints: Checkpoints, tmp_path: Path) -> None:
    save(checkpoints, 3)
    out = tmp_path / "deep" / "model"
    assert export_checkpoint(checkpoints.folder.parent, out) == checkpoints.folder / "global_step_3"
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(path.name for path in out.parent.iterdir()) == ["model"]


def test_export_into_an_empty_folder_but_never_over_anything(checkpoints: Checkpoints, tmp_path: Path) -> None:
    save(checkpoints, 3)
    (tmp_path / "empty").mkdir()
    export_checkpoint(checkpoints.folder, tmp_path / "empty")
    for taken in (tmp_path / "empty", checkpoints.folder / "latest"):
        with pytest.raises(RequestError, match="exists and is not an empty folder"):
            export_checkpoint(checkpoints.folder, taken)


# -------------------------------------------------------------------------------------------------------- the critic


def test_the_critic_is_saved_beside_the_policy(checkpoints: Checkpoints) -> None:
    checkpoints.save(3, FakePolicy(7), FakeLoader(3), FakePolicy(9))  # type: ignore[arg-type]
    listed = json.loads((checkpoints.folder / "global_step_3/manifest.json").read_text())["files"]
    assert "critic/model.safetensors" in listed
    policy, critic = FakePolicy(), FakePolicy()
    assert checkpoints.restore(policy, FakeLoader(), print, critic) == 3  # type: ignore[arg-type]
    assert (policy.value, critic.value) == (7, 9)


def test_a_damaged_critic_is_a_damaged_checkpoint(checkpoints: Checkpoints) -> None:
    for step in (3, 6):
        checkpoints.save(step, FakePolicy(step), FakeLoader(step), FakePolicy(step))  # type: ignore[arg-type]
    (checkpoints.folder / "global_step_6/critic/model.safetensors").write_text("8")
    critic = FakePolicy()
    assert checkpoints.restore(FakePolicy(), FakeLoader(), lambda said: None, critic) == 3  # type: ignore[arg-type]
    assert critic.value == 3


def test_a_run_that_needs_a_critic_does_not_go_on_without_one(checkpoints: Checkpoints) -> None:
    save(checkpoints, 3)
    policy = FakePolicy(1)
    with pytest.raises(
        RequestError, match=r"global_step_3 was saved by a run without a critic, and this run needs one"
    ):
        checkpoints.restore(policy, FakeLoader(), print, FakePolicy())  # type: ignore[arg-type]
    assert policy.value == 1  # refused before anything was loaded


def test_export_of_the_critic(checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoints.save(3, FakePolicy(7), FakeLoader(3), FakePolicy(9))  # type: ignore[arg-type]
    export_checkpoint(checkpoints.folder, tmp_path / "critic", "critic")
    assert (tmp_path / "critic/model.safetensors").read_text() == "9"
    assert sorted(path.name for path in (tmp_path / "critic").iterdir()) == ["config.json", "model.safetensors"]
    save(checkpoints, 6)
    with pytest.raises(RequestError, match="global_step_6 holds no critic: its run had none"):
        export_checkpoint(checkpoints.folder, tmp_path / "other", "critic")
    assert not (tmp_path / "other").exists()
