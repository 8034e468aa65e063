"""Uploads to a real S3 server (moto's, on the loopback): copying, going on, listing, a server and a process that die."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import fsspec
import pytest
from moto.s3.exceptions import InvalidPart
from moto.s3.models import S3Backend, s3_backends
from moto.server import ThreadedMotoServer
from uploading import Loader, Policy, save, uploading, whole

from posttrain.libraries.remote import RemoteFolder
from posttrain.run.checkpoint import Checkpoints
from posttrain.run.progress import Progress
from posttrain.run.remote import checkpoints_in

URL = "s3://bucket/team/run"
LARGE = 101 << 20  # bytes; files of 100 MiB and more are sent in parts


class Server:
    """Can be stopped and started again at its address; what it holds stays."""

    def __init__(self) -> None:
        self.port = 0
        self.start()

    def start(self) -> None:
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()
        self.port = self._server.get_host_and_port()[1]

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    environment = {
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
        "AWS_MAX_ATTEMPTS": "1",  # it is gone, and trying again takes seconds
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # one of another test knows another port
    boto3.client("s3").create_bucket(Bucket="bucket")
    yield server
    server.stop()
    s3_backends.reset()  # what it holds belongs to the process, so the next test would find it


def objects() -> list[str]:
    """What the server holds, asked by another library than the one that wrote it."""
    return sorted(one["Key"] for one in boto3.client("s3").list_objects_v2(Bucket="bucket").get("Contents", []))


@pytest.mark.slow
def test_upload_listing_and_resume(tmp_path: Path, server: Server) -> None:
    checkpoints, said = uploading(tmp_path / "first", URL, keep=2)
    save(checkpoints, 1, 2, 3)
    assert said == [f"uploaded global_step_{step} to {URL}" for step in (1, 2, 3)]
    files = ("manifest.json", "policy/model.safetensors", "run.json")
    assert objects() == [
        *(f"team/run/global_step_{step}/{name}" for step in (2, 3) for name in files),
        "team/run/latest",
        "team/run/run",
    ]
    listed = [(one.step, one.complete, len(one.files)) for one in checkpoints_in(RemoteFolder(URL))]
    assert listed == [(2, True, 3), (3, True, 3)]
    policy, loader = Policy(), Loader()
    resumed = Checkpoints(tmp_path / "second", origin=URL)
    assert resumed.restore(Progress(policy=policy, loader=loader), lambda said: None) == 3  # type: ignore[arg-type]
    assert (policy.value, loader.position) == (103, 3)


def test_a_server_that_dies_in_the_middle(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, said = uploading(tmp_path / "first", URL)
    save(checkpoints, 1)
    put = RemoteFolder.put

    def last_put(self: RemoteFolder, local: Path, name: str) -> None:
        put(self, local, name)
        server.stop()

    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "put", last_put)
        checkpoints.save(2, Progress(policy=Policy(102), loader=Loader(2)))  # type: ignore[arg-type]
        checkpoints.finish_uploads(60)
    assert said[1].startswith(f"the upload of global_step_2 to {URL} failed: Could not connect")
    assert Checkpoints(checkpoints.folder).last_good_name() == "global_step_2"  # the run has what it needs
    server.start()
    assert whole(URL) == [1]
    save(checkpoints, 3)
    assert whole(URL) == [1, 2, 3]
    assert said[3:] == [f"uploaded global_step_{step} to {URL}" for step in (2, 3)]


CHILD = """
import sys, time
from pathlib import Path
sys.path.append({tests!r})
from uploading import save, uploading
from posttrain.libraries.remote import RemoteFolder

put = RemoteFolder.put
def told(self, local, name):
    put(self, local, name)
    print(name, flush=True)
    if "step_2" in name:
        time.sleep(60)
RemoteFolder.put = told
checkpoints, _ = uploading(Path({folder!r}), {url!r})
save(checkpoints, 1, 2)
"""


@pytest.mark.slow
def test_a_process_that_is_killed_in_the_middle(tmp_path: Path, server: Server) -> None:
    code = CHILD.format(tests=str(Path(__file__).parent), folder=str(tmp_path / "first"), url=URL)
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ.copy())
    assert child.stdout
    for line in child.stdout:
        if "step_2" in line:
            break
    child.kill()
    child.wait()
    assert whole(URL) == [1]
    assert any("global_step_2/" in name for name in objects())  # a part is there
    policy = Policy()
    assert (
        Checkpoints(tmp_path / "second", origin=URL).restore(
            Progress(policy=policy, loader=Loader()), lambda said: None
        )
        == 1
    )  # type: ignore[arg-type]
    again, said = uploading(tmp_path / "first", URL, step=2)
    again.finish_uploads(30)
    assert said == [f"uploaded global_step_2 to {URL}"] and whole(URL) == [1, 2]


def test_a_server_that_is_gone_from_the_start(tmp_path: Path, server: Server) -> None:
    server.stop()
    start = time.monotonic()
    checkpoints, said = uploading(tmp_path, URL)
    save(checkpoints, 1)
    assert said[0].startswith(f"{URL} cannot be reached now (Could not connect")
    assert time.monotonic() - start < 30
    server.start()


class LargePolicy(Policy):
    """Its file is sent in three parts, of 50 MiB at most; on the disk it is a hole with a number at its end."""

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        with (folder / "model.safetensors").open("wb") as file:
            file.truncate(LARGE - 3)
            file.seek(LARGE - 3)
            file.write(str(self.value).encode())

    def load(self, folder: Path, *, optimizer: bool = True, schedule: bool = True) -> None:
        with (folder / "model.safetensors").open("rb") as file:
            file.seek(LARGE - 3)
            self.value = int(file.read())


@pytest.mark.slow
def test_a_file_that_is_sent_in_parts(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second part fails: there is no checkpoint there then, and the next upload is whole."""
    checkpoints, said = uploading(tmp_path / "first", URL)
    upload_part, parts = S3Backend.upload_part, []

    def failing(self: S3Backend, bucket: str, upload: str, part: int, *rest: Any, **more: Any) -> Any:
        parts.append(part)
        if part == 2 and parts.count(2) == 1:
            raise InvalidPart
        return upload_part(self, bucket, upload, part, *rest, **more)

    monkeypatch.setattr(S3Backend, "upload_part", failing)
    checkpoints.save(1, Progress(policy=LargePolicy(111), loader=Loader(1)))  # type: ignore[arg-type]
    checkpoints.finish_uploads(60)
    assert said[0].startswith(f"the upload of global_step_1 to {URL} failed: ")
    assert whole(URL) == []
    checkpoints.save(2, Progress(policy=LargePolicy(222), loader=Loader(2)))  # type: ignore[arg-type]
    checkpoints.finish_uploads(60)
    assert sorted(parts[-6:]) == [1, 1, 2, 2, 3, 3]
    assert whole(URL) == [1, 2]
    (listed,) = boto3.client("s3").list_objects_v2(Bucket="bucket", Prefix="team/run/global_step_2/policy")["Contents"]
    assert listed["Size"] == LARGE
    policy = LargePolicy()
    assert (
        Checkpoints(tmp_path / "second", origin=URL).restore(
            Progress(policy=policy, loader=Loader()), lambda said: None
        )
        == 2
    )  # type: ignore[arg-type]
    assert policy.value == 222
