"""Checkpoints elsewhere: copied in the background, valid or absent, found again; what fails never stops a run.

The store is memory:// and file:// here; tests/unit/stages/test_uploads_s3.py does the same with a real S3 server.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from uploading import MEMORY, Loader, Policy, save, uploading, whole

from posttrain.errors import RequestError
from posttrain.libraries.remote import RemoteFolder, problem_of
from posttrain.run import uploads as uploads_module
from posttrain.run.checkpoint import Checkpoints
from posttrain.run.progress import Progress
from posttrain.run.remote import checkpoints_in, download
from posttrain.run.retention import Retention
from posttrain.run.uploads import Uploads


@pytest.fixture(autouse=True)
def empty_store() -> Iterator[None]:
    yield
    fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize("store", ["memory", "file", "folder"])
def test_what_is_saved_is_copied_and_a_new_run_goes_on_from_it(tmp_path: Path, store: str) -> None:
    url = {"memory": MEMORY, "file": f"file://{tmp_path}/store/run", "folder": f"{tmp_path}/store/run"}[store]
    checkpoints, said = uploading(tmp_path / "first", url)
    save(checkpoints, 2, 4)
    assert said == [f"uploaded global_step_2 to {url}", f"uploaded global_step_4 to {url}"]
    assert whole(url) == [2, 4]
    assert RemoteFolder(url).read("latest") == b"global_step_4\n"

    for named, step in ((url, 4), (f"{url}/global_step_2", 2)):
        folder = tmp_path / f"from_{step}"
        policy, loader, told = Policy(), Loader(), []
        origin = Path(named) if store == "folder" else named
        resumed = Checkpoints(folder, origin=origin)
        assert resumed.restore(Progress(policy=policy, loader=loader), told.append) == step  # type: ignore[arg-type]
        assert (policy.value, loader.position) == (100 + step, step)
        assert told == ([] if store == "folder" else [f"copied global_step_{step} from {named}"])
        assert not folder.exists() or list(folder.iterdir()) == []  # the copy was for loading
        save(resumed, step + 1)  # started again, it goes on from its own, and looks nowhere else
        assert (
            Checkpoints(folder, origin=origin).restore(Progress(policy=policy, loader=loader), told.append) == step + 1
        )  # type: ignore[arg-type]


def test_as_many_stay_there_as_the_rules_say(tmp_path: Path) -> None:
    checkpoints, _ = uploading(tmp_path, keep=2)
    save(checkpoints, 1, 2, 3)
    assert whole() == [2, 3]
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["global_step_2", "global_step_3", "latest"]


def test_a_checkpoint_without_an_update_is_not_copied(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, Retention(last=1))
    checkpoints.upload_with(Uploads(MEMORY, tmp_path, Retention(last=1), "a", lambda said: None), 0)
    for step, idle in ((1, 0), (2, 1), (3, 2)):
        checkpoints.save(step, Progress(policy=Policy(), loader=Loader(), idle_steps=idle))  # type: ignore[arg-type]
        checkpoints.finish_uploads(10)
    assert whole() == [1]


def test_the_best_one_stays_there_by_the_metric_it_holds(tmp_path: Path) -> None:
    said: list[str] = []
    rules = Retention(last=1, best=1, metric="reward/mean")
    checkpoints = Checkpoints(tmp_path, rules)
    checkpoints.upload_with(Uploads(MEMORY, tmp_path, rules, "a", said.append), 0)
    for step, reward in ((1, 0.5), (2, 0.9), (3, 0.1), (4, 0.2)):
        checkpoints.save(step, Progress(policy=Policy(), loader=Loader()), metrics={"reward/mean": reward})  # type: ignore[arg-type]
        checkpoints.finish_uploads(10)
    assert whole() == [2, 4]


def test_a_failed_upload_is_said_and_made_up_for_after_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, said = uploading(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "put", broken_after(1, RemoteFolder.put))
        save(checkpoints, 1)
    assert whole() == []  # a part without a manifest is no checkpoint
    assert said[0].startswith(f"the upload of global_step_1 to {MEMORY} failed: the line is dead")
    assert said[1].startswith(f"not uploaded to {MEMORY}, because it failed: global_step_1")
    save(checkpoints, 2)
    assert said[2:] == [f"uploaded global_step_1 to {MEMORY}", f"uploaded global_step_2 to {MEMORY}"]
    assert whole() == [1, 2]


@pytest.mark.parametrize("files", range(5))
def test_an_upload_that_breaks_off_anywhere_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    """A checkpoint is two files and the manifest, and the pointer: broken before each of the four calls, and not at all."""
    checkpoints, _ = uploading(tmp_path / "first")
    save(checkpoints, 1)
    done: list[int] = []

    def limited(original: Any) -> Any:
        def call(*args: Any) -> Any:
            if len(done) == files:
                raise OSError("the line is dead")
            done.append(1)
            return original(*args)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "put", limited(RemoteFolder.put))
        patch.setattr(RemoteFolder, "write", limited(RemoteFolder.write))
        save(checkpoints, 2)
    policy = Policy()
    step = Checkpoints(tmp_path / "new", origin=MEMORY).restore(
        Progress(policy=policy, loader=Loader()), lambda said: None
    )  # type: ignore[arg-type]
    assert step == (2 if files == 4 else 1)  # whole with its manifest, and newest with the pointer
    assert policy.value == 100 + step

    again, _ = uploading(tmp_path / "first", step=2)  # the next start makes up for it
    again.finish_uploads(10)
    assert whole() == [1, 2]
    assert RemoteFolder(MEMORY).read("latest") == b"global_step_2\n"


def test_what_an_upload_left_is_removed_by_the_next_ones(tmp_path: Path) -> None:
    RemoteFolder(MEMORY).write("global_step_1/policy/model.safetensors", b"1")
    RemoteFolder(MEMORY).write("notes.txt", b"somebody's")
    checkpoints, _ = uploading(tmp_path)
    save(checkpoints, 2)
    assert [one.step for one in checkpoints_in(RemoteFolder(MEMORY))] == [2]
    assert RemoteFolder(MEMORY).read("notes.txt") == b"somebody's"


@pytest.mark.parametrize("damage", ["content", "missing", "manifest"])
def test_a_damaged_copy_is_named_and_passed_over(tmp_path: Path, damage: str) -> None:
    checkpoints, _ = uploading(tmp_path / "first")
    save(checkpoints, 1, 2)
    folder = RemoteFolder(MEMORY)
    if damage == "content":
        folder.write("global_step_2/policy/model.safetensors", b"998")
    elif damage == "missing":
        folder.delete("global_step_2/policy/model.safetensors")
    else:
        folder.write("global_step_2/manifest.json", b"{")
    told: list[str] = []
    assert download(MEMORY, tmp_path / "new", told.append).name == "global_step_1"
    reason = {
        "content": "policy/model.safetensors has changed",
        "missing": "policy/model.safetensors is missing",
        "manifest": "no readable manifest.json",
    }[damage]
    assert told == [f"checkpoint {MEMORY}/global_step_2 is damaged ({reason}); trying the one before"]


def test_a_manifest_cannot_write_outside_the_folder(tmp_path: Path) -> None:
    folder = RemoteFolder(MEMORY)
    entry = {"bytes": 1, "sha256": "x"}
    folder.write("global_step_1/manifest.json", json.dumps({"files": {"../../evil": entry}}).encode())
    with pytest.raises(RequestError, match=r"every checkpoint in .* is damaged"):
        download(MEMORY, tmp_path / "a/b", lambda said: None)
    assert not list(tmp_path.rglob("evil"))


def test_nothing_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="there is no checkpoint in memory://store/run; name a folder"):
        download(MEMORY, tmp_path / "x", lambda said: None)


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    checkpoints, _ = uploading(tmp_path / "first")
    save(checkpoints, 1)
    with pytest.raises(RequestError, match="holds checkpoints of another run, and this one would delete them"):
        uploading(tmp_path / "second", run="b")
    said: list[str] = []
    heir = Uploads(MEMORY, tmp_path / "third", Retention(), "c", said.append)
    heir.claim(f"{MEMORY}/global_step_1")  # going on from that run, in its folder
    assert json.loads(RemoteFolder(MEMORY).read("run") or b"") == {"id": "c"}


def test_a_folder_that_cannot_be_reached_does_not_stop_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "read", broken_after(0, RemoteFolder.read))
        checkpoints, said = uploading(tmp_path)
        save(checkpoints, 1)
    assert (
        said[0]
        == f"{MEMORY} cannot be reached now (the line is dead); the run continues, and tries after the next save"
    )
    save(checkpoints, 2)
    assert whole() == [1, 2]


def test_a_checkpoint_is_not_deleted_while_it_is_read_and_the_end_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, said = uploading(tmp_path, keep=1)
    reading, go_on = threading.Event(), threading.Event()
    upload = uploads_module.upload

    def slow(folder: RemoteFolder, local: Path) -> None:
        reading.set()
        assert go_on.wait(10)
        upload(folder, local)

    monkeypatch.setattr(uploads_module, "upload", slow)
    for step in (1, 2, 3):
        checkpoints.save(step, Progress(policy=Policy(100 + step), loader=Loader(step)))  # type: ignore[arg-type]
        assert reading.wait(10)
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["global_step_1", "global_step_3", "latest"]
    checkpoints.finish_uploads(0.05)
    assert said == [
        f"not uploaded to {MEMORY}, because it took longer than 0.05 s: global_step_1, global_step_2, global_step_3; "
        "start the run again to upload it"
    ]
    go_on.set()
    checkpoints.finish_uploads(10)
    assert said[1:] == [
        f"uploaded global_step_1 to {MEMORY}",
        f"global_step_2 was deleted here before it could be uploaded to {MEMORY}",
        f"uploaded global_step_3 to {MEMORY}",
    ]
    assert whole() == [3]
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["global_step_3", "latest"]


def test_another_checkpoint_of_the_same_name_is_replaced(tmp_path: Path) -> None:
    """A run that went back makes the same step again, with other numbers."""
    checkpoints, _ = uploading(tmp_path)
    save(checkpoints, 1)
    checkpoints.save(1, Progress(policy=Policy(555), loader=Loader(1)))  # type: ignore[arg-type]
    checkpoints.finish_uploads(10)
    assert RemoteFolder(MEMORY).read("global_step_1/policy/model.safetensors") == b"555"
    local = (checkpoints.folder / "global_step_1/manifest.json").read_bytes()
    assert RemoteFolder(MEMORY).read("global_step_1/manifest.json") == local


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("s3://", "s3:// names no folder"),
        ("s33://bucket/run", "s33:// is not known"),
    ],
)
def test_a_url_is_looked_at_before_the_run(url: str, what: str) -> None:
    problem = problem_of(url, "checkpoint.upload")
    assert problem is not None and problem.what == what and problem.field == "checkpoint.upload"


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(protocol: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    problem = problem_of("s3://bucket/run", "checkpoint.upload")
    assert problem is not None and problem.fix == "pip install 'posttrain[s3]'"


def broken_after(calls: int, original: Any) -> Any:
    """The same, until it has been called so often."""
    done: list[int] = []

    def call(*args: Any) -> Any:
        if len(done) >= calls:
            raise OSError("the line is dead")
        done.append(1)
        return original(*args)

    return call
