"""A folder of checkpoints belongs to one run; a run never begins at its first step where it had saved something."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from posttrain.build.runs import open_run
from posttrain.config import RunConfig
from posttrain.errors import ConfigError, RequestError
from posttrain.run import lock
from posttrain.run.lock import InUse, only_trainer
from posttrain.run.progress import Progress


class Policy:
    """An engine whose weights are the step that it has reached."""

    step = 0

    def saved_bytes(self) -> int:
        return 1

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        (folder / "model.safetensors").write_text(str(self.step))

    def load(self, folder: Path, *, optimizer: bool = True, schedule: bool = True) -> None:
        self.step = int((folder / "model.safetensors").read_text())


class Position:
    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Any) -> None:
        pass


def config(tmp_path: Path, name: str, **sections: dict[str, Any]) -> RunConfig:
    run = {"folder": str(tmp_path / name)} | sections.pop("run", {})
    tree = {"model": {"path": "a"}, "data": {"train_files": "train.parquet"}, "run": run, **sections}
    return RunConfig.model_validate(tree)


def train(
    config: RunConfig, *, until: int, save: bool = True, start_over: bool = False, allow: bool = False
) -> tuple[int, list[str]]:
    """Make steps, as a run does, whose last one is saved. Returns the first of them and the notes for the user."""
    notes: list[str] = []
    with open_run(config, allow_config_change=allow, start_over=start_over) as (folder, checkpoints, found):
        policy = Policy()
        progress = Progress(policy=policy, loader=Position())  # type: ignore[arg-type]
        first = checkpoints.restore(progress, notes.append) + 1
        assert policy.step == first - 1
        folder.begin(first_step=first, total_steps=99, device="cpu")
        folder.claim_checkpoints()
        with (folder.path / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps({"step": step}) + "\n" for step in range(first, until + 1))
        policy.step = until
        if save:
            checkpoints.save(until, progress)
        return first, [*found, *folder.notes, *notes]


def steps_of(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()]


# ------------------------------------------------------------------------------------------- lost checkpoints


@pytest.mark.parametrize("elsewhere", [False, True], ids=["default folder", "checkpoint.folder"])
@pytest.mark.parametrize("lost", ["all", "content", "run.json too"])
def test_a_run_whose_checkpoints_are_gone_does_not_begin_again(tmp_path: Path, elsewhere: bool, lost: str) -> None:
    """The folder is deleted, or the disk that it is on is not mounted, so that an empty folder is in its place."""
    place = {"checkpoint": {"folder": str(tmp_path / "disk/saved")}} if elsewhere else {}
    request = config(tmp_path, "A", **place)
    train(request, until=5)
    folder = tmp_path / ("disk" if elsewhere else "A/checkpoints")
    shutil.rmtree(folder)
    if lost == "content":
        folder.mkdir()
    if lost == "run.json too":
        (tmp_path / "A/run.json").unlink()
    with pytest.raises(ConfigError, match=r"holds a run of 5 steps, and .* holds none any more; .* add --start-over"):
        train(request, until=6)
    assert steps_of(tmp_path / "A") == [1, 2, 3, 4, 5]
    assert not folder.exists() or list(folder.iterdir()) == []


def test_starting_over_keeps_the_records(tmp_path: Path) -> None:
    request = config(tmp_path, "A")
    train(request, until=5)
    before = json.loads((tmp_path / "A/run.json").read_text())["id"]
    shutil.rmtree(tmp_path / "A/checkpoints")
    first, notes = train(request, until=3, start_over=True)
    assert first == 1 and notes == [f"the records of the steps until now are kept in {tmp_path / 'A/earlier_1'}"]
    assert steps_of(tmp_path / "A") == [1, 2, 3] and steps_of(tmp_path / "A/earlier_1") == [1, 2, 3, 4, 5]
    assert json.loads((tmp_path / "A/run.json").read_text())["id"] != before
    first, notes = train(request, until=7, start_over=True)  # the same command again
    assert first == 4 and "--start-over has no effect" in notes[0]


def test_starting_over_from_damaged_checkpoints(tmp_path: Path) -> None:
    request = config(tmp_path, "A")
    train(request, until=5)
    (tmp_path / "A/checkpoints/global_step_5/policy/model.safetensors").write_text("9")
    with pytest.raises(RequestError, match="or add --start-over"):
        train(request, until=6)
    assert train(request, until=2, start_over=True)[0] == 1
    assert (tmp_path / "A/checkpoints/global_step_5.aside1").is_dir() and steps_of(tmp_path / "A") == [1, 2]


def test_a_run_that_was_cut_off_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    """Nothing was saved, so nothing is lost: its steps are made again, and its rows are kept until they are."""
    request = config(tmp_path, "A")
    train(request, until=2, save=False)
    first, notes = train(request, until=5)
    assert first == 1 and notes[0] == "the run was cut off before its first checkpoint; its 2 steps are made again"
    assert steps_of(tmp_path / "A") == [1, 2, 3, 4, 5] and steps_of(tmp_path / "A/earlier_1") == [1, 2]


def test_a_run_from_another_ones_checkpoint_does_not_go_back_to_it(tmp_path: Path) -> None:
    train(config(tmp_path, "A"), until=5)
    fork = config(tmp_path, "B", run={"resume_path": str(tmp_path / "A")})
    assert train(fork, until=8)[0] == 6
    shutil.rmtree(tmp_path / "B/checkpoints")
    with pytest.raises(ConfigError, match=r"holds none any more"):
        train(fork, until=9)
    assert train(fork, until=7, start_over=True)[0] == 6
    assert steps_of(tmp_path / "B") == [6, 7] and steps_of(tmp_path / "B/earlier_1") == [6, 7, 8]


def test_a_copy_of_lost_checkpoints_may_be_named(tmp_path: Path) -> None:
    train(config(tmp_path, "A"), until=5)
    shutil.copytree(tmp_path / "A/checkpoints/global_step_5", tmp_path / "copy/global_step_5")
    shutil.rmtree(tmp_path / "A/checkpoints")
    again = config(tmp_path, "A", run={"resume_path": str(tmp_path / "copy")})
    assert train(again, until=7)[0] == 6
    assert steps_of(tmp_path / "A") == [1, 2, 3, 4, 5, 6, 7]


def test_a_configuration_of_the_users_names_no_run(tmp_path: Path) -> None:
    """Near a checkpoint may lie what has nothing to do with it."""
    (tmp_path / "config.yaml").write_text("model: {path: another}\n")
    train(config(tmp_path, "A"), until=5)
    shutil.copytree(tmp_path / "A/checkpoints/global_step_5", tmp_path / "copy/global_step_5")
    again = config(tmp_path, "B", run={"resume_path": str(tmp_path / "copy")})
    assert train(again, until=7)[0] == 6


# ------------------------------------------------------------------------------------------- another run's folder


def shared(tmp_path: Path, name: str, **sections: dict[str, Any]) -> RunConfig:
    return config(tmp_path, name, checkpoint={"folder": str(tmp_path / "C")}, **sections)


@pytest.mark.parametrize("resume", ["auto", "never"])
@pytest.mark.parametrize("path", ["C", "link", "A/checkpoints"])
def test_another_runs_checkpoints_are_refused(tmp_path: Path, resume: str, path: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "C")
    train(config(tmp_path, "A") if path == "A/checkpoints" else shared(tmp_path, "A"), until=5)
    other = config(tmp_path, "B", run={"resume": resume}, checkpoint={"folder": str(tmp_path / path)})
    with pytest.raises(ConfigError, match=r"belong to another run, the one in .*/A; .* add run\.resume_path="):
        train(other, until=6)
    assert not (tmp_path / "B").exists()
    taken = config(tmp_path, "B", run={"resume_path": str(tmp_path / path)})
    assert train(taken, until=6)[0] == 6  # by name


def test_a_run_that_must_not_resume_does_not_take_its_own_checkpoints_either(tmp_path: Path) -> None:
    train(shared(tmp_path, "A"), until=5)
    shutil.rmtree(tmp_path / "A")
    with pytest.raises(
        ConfigError, match=r"C already holds checkpoints; name another checkpoint\.folder, or set run\.re"
    ):
        train(shared(tmp_path, "A", run={"resume": "never"}), until=6)


def test_a_run_folder_that_is_gone_is_made_again_from_its_checkpoints(tmp_path: Path) -> None:
    """On a machine whose run folder did not survive. Its configuration is in owner.json, and is compared."""
    train(shared(tmp_path, "A"), until=5)
    known = json.loads((tmp_path / "C/owner.json").read_text())["id"]
    shutil.rmtree(tmp_path / "A")
    with pytest.raises(ConfigError, match=r"had policy\.optimizer\.lr"):
        train(shared(tmp_path, "A", policy={"optimizer": {"lr": 0.5}}), until=6)
    first, notes = train(shared(tmp_path, "A"), until=6)
    assert first == 6 and "has lost its run.json; its id is taken from" in notes[0]
    assert "config.yaml is gone or damaged, compared with owner.json" in notes[1]
    assert "metrics.jsonl is gone, and with it the rows of steps 1 to 5" in notes[2]
    assert json.loads((tmp_path / "A/run.json").read_text())["id"] == known


def test_a_run_folder_may_be_moved_and_a_copy_shares_no_checkpoints(tmp_path: Path) -> None:
    train(shared(tmp_path, "A"), until=5)
    (tmp_path / "A").rename(tmp_path / "moved")
    assert train(shared(tmp_path, "moved"), until=6)[0] == 6
    shutil.copytree(tmp_path / "moved", tmp_path / "copy")
    with pytest.raises(ConfigError, match=r"copy is a copy of the run in .*moved, which saves into .*C; name another"):
        train(shared(tmp_path, "copy"), until=7)


def test_checkpoints_of_an_earlier_version_are_adopted(tmp_path: Path) -> None:
    for request, folder in ((config(tmp_path, "A"), "A/checkpoints"), (shared(tmp_path, "B"), "C")):
        train(request, until=5)
        (tmp_path / folder / "owner.json").unlink()
        path = Path(request.folder) / "run.json"
        about = json.loads(path.read_text())
        path.write_text(json.dumps({key: about[key] for key in ("id", "resumes", "checkpoints", "status")}))
        first, notes = train(request, until=6)
        assert first == 6 and "has no owner on record" in notes[0]
        assert json.loads((tmp_path / folder / "owner.json").read_text())["id"] == about["id"]


def test_checkpoints_that_neither_side_knows_are_refused(tmp_path: Path) -> None:
    train(shared(tmp_path, "A"), until=5)
    (tmp_path / "C/owner.json").unlink()
    with pytest.raises(
        ConfigError, match=r"C holds checkpoints, and neither it nor .*B says of which run; name another"
    ):
        train(shared(tmp_path, "B"), until=6)


# ------------------------------------------------------------------------------------------- locks


def test_the_default_folder_of_checkpoints_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "PATIENCE_S", 0.1)
    with open_run(config(tmp_path, "A"), allow_config_change=False, start_over=False):
        into = config(tmp_path, "B", checkpoint={"folder": str(tmp_path / "A/checkpoints")})
        with (
            pytest.raises(InUse, match=r"training in .*A/checkpoints .* or name another checkpoint\.folder"),
            open_run(into, allow_config_change=False, start_over=False),
        ):
            raise AssertionError("let in")


def test_one_process_may_reach_a_folder_by_two_paths(tmp_path: Path) -> None:
    (tmp_path / "A").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "A")
    with only_trainer(tmp_path / "A", tmp_path / "link") as notes:
        assert notes == []
