"""Checkpoints are whole or absent, and the newest whole one is found."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RequestError, RunStopped
from posttrain.run import checkpoint, durable
from posttrain.run.checkpoint import Checkpoints
from posttrain.run.checkpoint_folders import damage_of, resolve_checkpoint
from posttrain.run.export import export_checkpoint
from posttrain.run.progress import Progress
from posttrain.run.retention import Retention


class FakePolicy:
    """Its state is one number, in one file among others."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def saved_bytes(self) -> int:
        return 3

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        assert list(folder.iterdir()) == []
        (folder / "model.safetensors").write_text(str(self.value))
        (folder / "config.json").write_text("{}")
        (folder / "optimizer.safetensors").write_text("averages")
        (folder / "engine.json").write_text("{}")

    def load(self, folder: Path, *, optimizer: bool = True, schedule: bool = True) -> None:
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
        checkpoints.save(step, Progress(policy=FakePolicy(100 + step), loader=FakeLoader(step)))  # type: ignore[arg-type]


def restore(checkpoints: Checkpoints) -> tuple[int, int, int, list[str]]:
    """Step, policy, data position, and what was said."""
    policy, loader, said = FakePolicy(), FakeLoader(), []
    step = checkpoints.restore(Progress(policy=policy, loader=loader), said.append)  # type: ignore[arg-type]
    return step, policy.value, loader.position, said


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "run" / "checkpoints")


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir())


def test_nothing_saved_restores_nothing(checkpoints: Checkpoints) -> None:
    assert restore(checkpoints) == (0, 0, 0, [])
    assert checkpoints.last_good_name() is None


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
    pointer = checkpoints.folder / "latest"
    assert said == [
        f"checkpoint global_step_6 is damaged ({reason}); trying the one before",
        f"{pointer} named 'global_step_6'; the newest valid checkpoint is global_step_3, which it names now",
    ]
    assert pointer.read_text() == "global_step_3\n"
    assert checkpoints.passed_over == [f"global_step_6: {reason}"]
    assert checkpoints.last_good_name() == "global_step_3"


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
        with pytest.raises(RunStopped, match=r"the checkpoint of step 6 could not be written to .*: No space left on"):
            save(checkpoints, 6)
    assert restore(checkpoints) == (3, 103, 3, [])
    assert (checkpoints.folder / "latest").read_text() == "global_step_3\n"
    save(checkpoints, 6)  # what was left behind is in nobody's way
    assert names(checkpoints) == ["global_step_3", "global_step_6", "latest"]


def test_saving_a_step_again_replaces_it(checkpoints: Checkpoints) -> None:
    save(checkpoints, 3)
    checkpoints.save(3, Progress(policy=FakePolicy(7), loader=FakeLoader(8)))  # type: ignore[arg-type]
    assert restore(checkpoints) == (3, 7, 8, [])


def test_older_checkpoints_are_dropped(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, Retention(last=2))
    save(checkpoints, 1, 2, 3, 10)
    assert names(checkpoints) == ["global_step_10", "global_step_3", "latest"]


def test_damaged_later_checkpoint_does_not_push_out_what_a_resumed_run_saves(tmp_path: Path) -> None:
    """Step 6 is damaged, the run goes on from 3 and saves 4: that one has to stay."""
    checkpoints = Checkpoints(tmp_path, Retention(last=1))
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
    damage_content(checkpoints.folder / "global_step_3")
    with pytest.raises(
        RequestError, match=r"every checkpoint in .* is damaged \(global_step_6: policy/model\.safetensors has"
    ):
        resolve_checkpoint(checkpoints.folder.parent)


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


def test_an_export_to_a_full_disk_names_the_file_and_leaves_nothing(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(checkpoints, 3)

    def full(source: str, target: Path, **_: object) -> None:
        raise shutil.Error([(source, str(target / "model.safetensors"), "[Errno 28] No space left on device: ''")])

    monkeypatch.setattr(shutil, "copytree", full)
    with pytest.raises(OSError, match=r"No space left on device: .*model.safetensors") as raised:
        export_checkpoint(checkpoints.folder, tmp_path / "out/model")
    assert raised.value.errno == errno.ENOSPC
    assert list((tmp_path / "out").iterdir()) == []


# -------------------------------------------------------------------------------------------------------- the critic


def test_the_critic_is_saved_beside_the_policy(checkpoints: Checkpoints) -> None:
    checkpoints.save(3, Progress(policy=FakePolicy(7), loader=FakeLoader(3), critic=FakePolicy(9)))  # type: ignore[arg-type]
    listed = json.loads((checkpoints.folder / "global_step_3/manifest.json").read_text())["files"]
    assert "critic/model.safetensors" in listed
    policy, critic = FakePolicy(), FakePolicy()
    assert checkpoints.restore(Progress(policy=policy, loader=FakeLoader(), critic=critic), print) == 3  # type: ignore[arg-type]
    assert (policy.value, critic.value) == (7, 9)


def test_a_damaged_critic_is_a_damaged_checkpoint(checkpoints: Checkpoints) -> None:
    for step in (3, 6):
        checkpoints.save(step, Progress(policy=FakePolicy(step), loader=FakeLoader(step), critic=FakePolicy(step)))  # type: ignore[arg-type]
    (checkpoints.folder / "global_step_6/critic/model.safetensors").write_text("8")
    critic = FakePolicy()
    assert (
        checkpoints.restore(Progress(policy=FakePolicy(), loader=FakeLoader(), critic=critic), lambda said: None) == 3
    )  # type: ignore[arg-type]
    assert critic.value == 3


def test_a_run_that_needs_a_critic_does_not_go_on_without_one(checkpoints: Checkpoints) -> None:
    save(checkpoints, 3)
    policy = FakePolicy(1)
    with pytest.raises(
        RequestError, match=r"global_step_3 was saved by a run without a critic, and this run needs one"
    ):
        checkpoints.restore(Progress(policy=policy, loader=FakeLoader(), critic=FakePolicy()), print)  # type: ignore[arg-type]
    assert policy.value == 1  # refused before anything was loaded


def test_export_of_the_critic(checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoints.save(3, Progress(policy=FakePolicy(7), loader=FakeLoader(3), critic=FakePolicy(9)))  # type: ignore[arg-type]
    export_checkpoint(checkpoints.folder, tmp_path / "critic", "critic")
    assert (tmp_path / "critic/model.safetensors").read_text() == "9"
    assert sorted(path.name for path in (tmp_path / "critic").iterdir()) == ["config.json", "model.safetensors"]
    save(checkpoints, 6)
    with pytest.raises(RequestError, match="global_step_6 holds no critic: its run had none"):
        export_checkpoint(checkpoints.folder, tmp_path / "other", "critic")
    assert not (tmp_path / "other").exists()


# ---------------------------------------------------------------------------------------------------- what is kept


def keep(tmp_path: Path, metric: dict[int, float | None], **rules: Any) -> list[str]:
    """Save these steps, each with its value of the metric ``m``; the steps that are left."""
    checkpoints = Checkpoints(tmp_path, Retention(metric="m", **rules))
    for step, value in metric.items():
        measured = {"other": 1.0} if value is None else {"m": value}
        checkpoints.save(step, Progress(policy=FakePolicy(step), loader=FakeLoader(step)), measured)  # type: ignore[arg-type]
    return [name.removeprefix("global_step_") for name in names(checkpoints)]


def test_best_checkpoints_are_kept_and_named(tmp_path: Path) -> None:
    """Step 2 is the best, step 4 was not measured, step 5 is no number: the last one and the two best stay."""
    values = {1: 0.1, 2: 0.9, 3: 0.5, 4: None, 5: float("nan"), 6: 0.2, 7: 0.3}
    assert keep(tmp_path, values, last=1, best=2) == ["best", "2", "3", "7", "latest"]
    assert (tmp_path / "best").read_text() == "global_step_2\n"


def test_low_values_can_be_the_good_ones(tmp_path: Path) -> None:
    assert keep(tmp_path, {1: 0.1, 2: 0.9, 3: 0.5, 4: 0.4}, last=1, best=1, mode="min") == ["best", "1", "4", "latest"]


def test_a_checkpoint_without_an_update_is_resumed_but_counts_for_nothing(tmp_path: Path) -> None:
    """Steps 3 to 5 made no update: of these the newest stays, and the last two and the best of the others do, although an
    idle one measured more."""
    checkpoints = Checkpoints(tmp_path, Retention(last=2, best=1, metric="m"))
    progress = Progress(policy=FakePolicy(7), loader=FakeLoader())  # type: ignore[arg-type]
    for step, idle, value in ((1, 0, 0.5), (2, 0, 0.1), (3, 1, 0.9), (4, 2, 0.2), (5, 3, 0.3)):
        progress.idle_steps = idle
        checkpoints.save(step, progress, {"m": value})
    assert names(checkpoints) == ["best", "global_step_1", "global_step_2", "global_step_5", "latest"]
    assert (tmp_path / "best").read_text() == "global_step_1\n"
    assert checkpoints.last_good_name() == "global_step_2"
    resumed = Progress(policy=FakePolicy(), loader=FakeLoader())  # type: ignore[arg-type]
    assert Checkpoints(tmp_path).restore(resumed, print) == 5 and resumed.idle_steps == 3
    progress.idle_steps = 0
    checkpoints.save(6, progress, {"m": 0.1})
    assert names(checkpoints) == ["best", "global_step_1", "global_step_2", "global_step_6", "latest"]
    assert checkpoints.last_good_name() == "global_step_6"


def test_a_checkpoint_of_an_earlier_version_was_saved_after_an_update(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1)
    folder = checkpoints.folder / "global_step_1"
    state = json.loads((folder / "run.json").read_text())
    del state["idle_steps"]
    (folder / "run.json").write_text(json.dumps(state))
    (folder / "manifest.json").unlink()
    durable.write_manifest(folder)
    progress = Progress(policy=FakePolicy(), loader=FakeLoader(), idle_steps=2)  # type: ignore[arg-type]
    assert checkpoints.restore(progress, print) == 1 and progress.idle_steps == 0
    assert checkpoints.last_good_name() == "global_step_1"


def test_every_mth_is_kept(tmp_path: Path) -> None:
    """Of 1 to 7: the newest two, and those that 3 divides."""
    assert keep(tmp_path, dict.fromkeys(range(1, 8)), last=2, every=3) == ["3", "6", "7", "latest"]


def test_all_are_kept_without_keep_last(tmp_path: Path) -> None:
    assert keep(tmp_path, {1: 0.1, 2: 0.2}, every=2) == ["1", "2", "latest"]


def test_the_best_is_remembered_by_the_run_that_goes_on(tmp_path: Path) -> None:
    keep(tmp_path, {1: 0.9, 2: 0.1}, last=1, best=1)
    assert keep(tmp_path, {3: 0.5}, last=1, best=1) == ["best", "1", "3", "latest"]


# -------------------------------------------------------------------------------------- what a killed process leaves


def test_a_whole_checkpoint_that_was_not_renamed_is_put_in_its_place(checkpoints: Checkpoints) -> None:
    save(checkpoints, 3, 6)
    (checkpoints.folder / "global_step_6").rename(checkpoints.folder / "global_step_6.tmp")
    step, value, _, said = restore(checkpoints)
    assert (step, value) == (6, 106)
    assert said == ["checkpoint global_step_6 was whole but not in its place when the run was cut off; it is now"]


def test_leftovers_are_removed(checkpoints: Checkpoints) -> None:
    save(checkpoints, 3, 6, 9)
    (checkpoints.folder / "global_step_3").rename(checkpoints.folder / "global_step_3.old")
    (checkpoints.folder / "global_step_6").rename(checkpoints.folder / "global_step_6.tmp")
    damage_content(checkpoints.folder / "global_step_6.tmp")
    assert restore(checkpoints) == (9, 109, 9, [])
    assert names(checkpoints) == ["global_step_9", "latest"]


POINTERS = {"": "named ''", "global_step_99\n": "named 'global_step_99'", None: "was not readable"}


@pytest.mark.parametrize(("pointer", "reason"), POINTERS.items())
def test_an_empty_lying_or_missing_pointer_is_told_and_put_right(
    checkpoints: Checkpoints, pointer: str | None, reason: str
) -> None:
    save(checkpoints, 3, 6)
    path = checkpoints.folder / "latest"
    path.unlink()
    if pointer is not None:
        path.write_text(pointer)
    step, _, _, said = restore(checkpoints)
    assert step == 6
    assert said == [f"{path} {reason}; the newest valid checkpoint is global_step_6, which it names now"]
    assert path.read_text() == "global_step_6\n"


def test_checkpoints_that_are_gone_are_missed(checkpoints: Checkpoints) -> None:
    """All folders deleted, the pointer forgotten: this is no new run."""
    save(checkpoints, 3)
    shutil.rmtree(checkpoints.folder / "global_step_3")
    with pytest.raises(
        RequestError, match=r"latest names global_step_3, and there is no checkpoint beside it any more"
    ):
        restore(checkpoints)


def damage_listed(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"files": {}}')


def damage_entry(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"bytes"', '"bytez"', 1))


@pytest.mark.parametrize(
    ("damage", "reason"), [(damage_listed, "manifest.json does not list run.json"), (damage_entry, "no readable")]
)
def test_a_manifest_that_lies(checkpoints: Checkpoints, damage: Any, reason: str) -> None:
    save(checkpoints, 3)
    damage(checkpoints.folder / "global_step_3")
    assert reason in str(damage_of(checkpoints.folder / "global_step_3"))


def test_who_has_written_a_file_hashes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mine", "changed_since", "theirs"):
        (tmp_path / name).write_text(name)
    durable.note_hashes([tmp_path / "theirs", tmp_path / "changed_since"])
    (tmp_path / "changed_since").write_text("other")
    hashed = []
    sha256 = durable._sha256
    monkeypatch.setattr(durable, "_sha256", lambda path: (hashed.append(path.name), sha256(path))[1])
    durable.write_manifest(tmp_path)
    assert hashed == ["changed_since", "mine"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["changed_since", "manifest.json", "mine", "theirs"]
    listed = json.loads((tmp_path / "manifest.json").read_text())["files"]
    assert {name: entry["sha256"] for name, entry in listed.items()} == {
        name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in ("changed_since", "mine", "theirs")
    }


@pytest.mark.parametrize("size", [0, 1 << 40], ids=["in_threads", "one_by_one"])
def test_the_first_damage_is_told_however_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(durable, "_IN_THREADS_BYTES", size)
    for number in range(30):
        (tmp_path / f"{number:02}").write_text(f"{number:02}")
    durable.write_manifest(tmp_path)
    assert durable.damage_of(tmp_path) is None
    for number in (21, 7, 25):
        (tmp_path / f"{number:02}").write_text("xx")
    assert durable.damage_of(tmp_path) == "07 has changed"


def test_a_disk_that_cannot_read_a_file_back(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    save(checkpoints, 3)

    def broken(path: Path) -> str:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(durable, "_sha256", broken)
    assert damage_of(checkpoints.folder / "global_step_3") == "policy/config.json cannot be read: Input/output error"


def test_no_room_is_seen_before_anything_is_written(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    save(checkpoints, 3)
    monkeypatch.setattr(FakePolicy, "saved_bytes", lambda self: 10**18)
    before = names(checkpoints)
    with pytest.raises(
        RunStopped, match=r"step 6 needs 1,000,000,000,000,000,000 bytes and .* has [\d,]+ free; nothing"
    ):
        save(checkpoints, 6)
    assert names(checkpoints) == before


# -------------------------------------------------------------------------------- starting from a checkpoint by name


def test_a_run_that_starts_from_another_runs_checkpoint(checkpoints: Checkpoints, tmp_path: Path) -> None:
    save(checkpoints, 3, 6)
    mine = Checkpoints(tmp_path / "mine", origin=checkpoints.folder / "global_step_3")
    assert restore(mine)[:3] == (3, 103, 3)
    mine.save(4, Progress(policy=FakePolicy(7), loader=FakeLoader(4)))  # type: ignore[arg-type]
    assert restore(mine)[:3] == (4, 7, 4)  # started again, it goes on
    assert (
        restore(Checkpoints(tmp_path / "other", origin=checkpoints.folder.parent))[0] == 6
    )  # a run folder: its newest


def test_going_back_in_the_same_folder(checkpoints: Checkpoints) -> None:
    save(checkpoints, 3, 6, 9)
    back = Checkpoints(checkpoints.folder, origin=checkpoints.folder / "global_step_3")
    step, _, _, said = restore(back)
    assert step == 3
    assert said[:2] == [
        "the run goes back to step 3: checkpoint global_step_6 is kept as global_step_6.aside1",
        "the run goes back to step 3: checkpoint global_step_9 is kept as global_step_9.aside1",
    ]
    back.save(4, Progress(policy=FakePolicy(7), loader=FakeLoader(4)))  # type: ignore[arg-type]
    assert restore(back)[:2] == (4, 7)
    assert restore(checkpoints)[0] == 4  # and without the path, too


def test_a_folder_of_another_course_is_not_gone_on_in(checkpoints: Checkpoints, tmp_path: Path) -> None:
    save(checkpoints, 3)
    mine = Checkpoints(tmp_path / "mine", origin=checkpoints.folder)
    save(Checkpoints(tmp_path / "mine"), 5)
    with pytest.raises(RequestError, match="holds checkpoints of a run that did not start from"):
        restore(mine)


def test_shards_of_another_trainer_are_recognised(tmp_path: Path) -> None:
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor/model_world_size_2_rank_0.pt").touch()
    with pytest.raises(RequestError, match=r"but shards of another trainer; merge them \(posttrain export"):
        resolve_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (Exception("No space left on device (os error 28)"), RunStopped),  # what the library tokenizers raises
        (RuntimeError("a mistake"), RuntimeError),
    ],
)
def test_a_full_disk_is_known_by_what_libraries_raise(
    checkpoints: Checkpoints, error: Exception, raised: type[Exception]
) -> None:
    class Failing(FakePolicy):
        def save(self, folder: Path, *, optimizer: bool = True) -> None:
            raise error

    with pytest.raises(raised, match=str(error.args[0])[:9]):
        checkpoints.save(1, Progress(policy=Failing(), loader=FakeLoader()))  # type: ignore[arg-type]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_all_files_of_a_checkpoint_and_an_export_have_the_mode_of_new_files(
    checkpoints: Checkpoints, tmp_path: Path, umask: int
) -> None:
    """Libraries write weights with mode 0600, whatever the umask."""

    class Private(FakePolicy):
        def save(self, folder: Path, *, optimizer: bool = True) -> None:
            super().save(folder)
            (folder / "model.safetensors").chmod(0o600)

    before = os.umask(umask)
    try:
        checkpoints.save(1, Progress(policy=Private(), loader=FakeLoader()))  # type: ignore[arg-type]
        export_checkpoint(checkpoints.folder, tmp_path / "out")
    finally:
        os.umask(before)
    files = [path for top in (checkpoints.folder / "global_step_1", tmp_path / "out") for path in top.rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in files if path.is_file()} == {0o666 & ~umask}
