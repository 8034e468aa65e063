"""A disk that fails or is full ends a run by exit code 3, with the file and the reason."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from posttrain.backends.tracking.jsonl import Jsonl
from posttrain.config import RunConfig
from posttrain.errors import RunStopped
from posttrain.run import durable
from posttrain.run.checkpoint import Checkpoints
from posttrain.run.lifetime import begin_run, disk_stops_the_run, under_way
from posttrain.run.run_folder import RunFolder
from posttrain.run.samples import write_samples
from posttrain.run.trackers import Trackers


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ESTALE])
@pytest.mark.parametrize("file", ["metrics.jsonl", "run.json", "config.yaml", "samples/step_1.jsonl"])
def test_a_disk_that_fails_stops_the_run_and_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, file: str
) -> None:
    """Nothing of it is a bug: exit code 3, the file, the reason, and the last good checkpoint."""
    tree = {"model": {"path": "a"}, "data": {"train_files": "b"}, "run": {"folder": str(tmp_path)}}
    config = RunConfig.model_validate(tree)
    folder, checkpoints = RunFolder(config), Checkpoints(tmp_path / "checkpoints")
    trackers = Trackers([Jsonl(tmp_path)], [])

    def fail(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))  # as writing and syncing do, without a name

    def begin() -> None:
        begin_run(config, folder, checkpoints, trackers, first_step=1, total_steps=2, device="cpu", notes=[])

    said = rf"{tmp_path / file}: {os.strerror(code)}"
    if file.startswith("run.json"):
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(RunStopped, match=said):
            begin()
        return
    if file == "config.yaml":
        sync = durable.sync
        monkeypatch.setattr(durable, "sync", lambda path: fail() if path.name == "config.yaml.tmp" else sync(path))
        with pytest.raises(RunStopped, match=said):
            begin()
        return
    begin()
    with (
        pytest.raises(RunStopped, match=said + r"\nLast good checkpoint: none was saved"),
        under_way(config, folder, checkpoints, trackers, 1),
    ):
        if file == "metrics.jsonl":
            monkeypatch.setattr(os, "fsync", fail)
            trackers.log(1, {"reward/mean": 0.5})
        else:
            monkeypatch.setattr(os, "replace", fail)
            write_samples(tmp_path / file, 1, [])


def test_an_error_of_a_connection_is_none_of_a_disk(tmp_path: Path) -> None:
    for error in (
        OSError(errno.ENOTCONN, "not connected"),
        PermissionError(errno.EPERM, "not allowed"),
        OSError("odd"),
    ):
        with pytest.raises(OSError, match=str(error.args[-1])), disk_stops_the_run():
            raise error
