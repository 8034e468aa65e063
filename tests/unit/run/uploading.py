"""Checkpoints of a policy that is one number, uploaded somewhere."""

from __future__ import annotations

from pathlib import Path

from posttrain.libraries.remote import RemoteFolder
from posttrain.run.checkpoint import Checkpoints
from posttrain.run.progress import Progress
from posttrain.run.remote import checkpoints_in
from posttrain.run.retention import Retention
from posttrain.run.uploads import Uploads

MEMORY = "memory://store/run"


class Policy:
    """Its state is one number, in one file."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def saved_bytes(self) -> int:
        return 3

    def save(self, folder: Path, *, optimizer: bool) -> None:
        (folder / "model.safetensors").write_text(str(self.value))

    def load(self, folder: Path, *, optimizer: bool, schedule: bool) -> None:
        self.value = int((folder / "model.safetensors").read_text())


class Loader:
    def __init__(self, position: int = 0) -> None:
        self.position = position

    def state(self) -> dict[str, int]:
        return {"position": self.position}

    def restore(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def uploading(
    folder: Path, url: str = MEMORY, *, keep: int | None = None, run: str = "a", step: int = 0
) -> tuple[Checkpoints, list[str]]:
    """Checkpoints that are uploaded, and what is said about it."""
    said: list[str] = []
    checkpoints = Checkpoints(folder / "checkpoints", Retention(last=keep))
    checkpoints.upload_with(Uploads(url, checkpoints.folder, checkpoints.retention, run, said.append), step)
    return checkpoints, said


def save(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.save(step, Progress(policy=Policy(100 + step), loader=Loader(step)))  # type: ignore[arg-type]
        checkpoints.finish_uploads(10)


def whole(url: str = MEMORY) -> list[int]:
    return [one.step for one in checkpoints_in(RemoteFolder(url)) if one.complete]
