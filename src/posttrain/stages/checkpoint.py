"""Checkpoints: folders that are whole or absent.

    RUN_DIR/checkpoints/global_step_N/policy/     a Hugging Face folder, plus the engine's own state
                                     /critic/     the same, of the critic; absent without one
                                     /run.json    step, data position, running statistics of the rewards
                                     /manifest.json   size and SHA-256 of every file
    RUN_DIR/checkpoints/latest                    the name of the newest one

A checkpoint is written beside (global_step_N.tmp), synced, renamed, and only then pointed at. Which one is newest is told by
the folders that match their manifest, not by the pointer; the pointer is for people and other tools.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import Problem, RequestError
from posttrain.interfaces.loader import PromptLoader
from posttrain.interfaces.train_engine import TrainEngine, ValueEngine

if TYPE_CHECKING:
    from posttrain.stages.shape_rewards import RewardState

PREFIX = "global_step_"
MANIFEST = "manifest.json"
RUN_STATE = "run.json"


class Checkpoints:
    """The checkpoints of one run. ``keep_last`` None keeps all."""

    def __init__(self, folder: Path, keep_last: int | None = None):
        self.folder = folder
        self.keep_last = keep_last

    def save(
        self,
        step: int,
        policy: TrainEngine,
        loader: PromptLoader,
        critic: ValueEngine | None = None,
        rewards: RewardState | None = None,
    ) -> str:
        """Write the state after ``step``; then drop checkpoints beyond keep_last. Returns the folder's name."""
        name = f"{PREFIX}{step}"
        beside = self.folder / f"{name}.tmp"
        shutil.rmtree(beside, ignore_errors=True)
        (beside / "policy").mkdir(parents=True)
        policy.save(beside / "policy")
        if critic:
            (beside / "critic").mkdir()
            critic.save(beside / "critic")
        state = {"step": step, "loader": dict(loader.state()), "rewards": rewards.state() if rewards else None}
        (beside / RUN_STATE).write_text(json.dumps(state))
        write_manifest(beside)
        final = self.folder / name
        shutil.rmtree(final, ignore_errors=True)  # left by a run that was told to start over
        os.replace(beside, final)
        _sync(self.folder)
        pointer = self.folder / "latest.tmp"
        pointer.write_text(name + "\n")
        _sync(pointer)
        os.replace(pointer, self.folder / "latest")
        if self.keep_last:
            # Higher numbers are damaged ones that a resumed run went back behind; they must not push out what it saves.
            for old in [number for number in self._steps() if number <= step][: -self.keep_last]:
                shutil.rmtree(self.folder / f"{PREFIX}{old}")
        return name

    def restore(
        self,
        policy: TrainEngine,
        loader: PromptLoader,
        say: Callable[[str], None],
        critic: ValueEngine | None = None,
        rewards: RewardState | None = None,
    ) -> int:
        """Load the newest valid checkpoint; damaged newer ones are named and passed over. Returns its step, 0 without one.

        Raises: RequestError when there are checkpoints and all are damaged (starting over must be asked for), or when this
            run has a critic and the checkpoint has none.
        """
        for step in reversed(self._steps()):
            folder = self.folder / f"{PREFIX}{step}"
            damage = damage_of(folder)
            if damage:
                say(f"checkpoint {folder.name} is damaged ({damage}); trying the one before")
                continue
            if critic and not (folder / "critic").is_dir():
                what = f"{folder} was saved by a run without a critic, and this run needs one"
                fix = "name another run.folder, or go on with the advantage estimator of that run"
                raise RequestError(Problem(what, fix=fix, field="advantage.name"))
            policy.load(folder / "policy")
            if critic:
                critic.load(folder / "critic")
            state: dict[str, Any] = json.loads((folder / RUN_STATE).read_text())
            loader.restore(state["loader"])
            if rewards and state.get("rewards"):
                rewards.restore(state["rewards"])
            return step
        if self.exist():
            fix = "put back a copy, or name another run.folder to start over"
            raise RequestError(Problem(f"every checkpoint in {self.folder} is damaged", fix=fix, field="run.folder"))
        return 0

    def exist(self) -> bool:
        """Whether any checkpoint is there, valid or not."""
        return bool(self._steps())

    def holds(self, step: int) -> bool:
        """Whether the checkpoint of this step is there and not damaged."""
        return damage_of(self.folder / f"{PREFIX}{step}") is None

    def newest_name(self) -> str | None:
        """Folder name of the newest checkpoint that is not damaged."""
        names = (f"{PREFIX}{step}" for step in reversed(self._steps()))
        return next((name for name in names if damage_of(self.folder / name) is None), None)

    def _steps(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        names = (path.name.removeprefix(PREFIX) for path in self.folder.iterdir() if path.name.startswith(PREFIX))
        return sorted(int(name) for name in names if name.isdecimal())


def write_manifest(folder: Path) -> None:
    """Record size and hash of every file below ``folder``, and sync them all to disk."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        files[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        _sync(path)
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"files": files}, indent=1))
    _sync(manifest)
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        _sync(path)


def damage_of(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None when every file is as its manifest says."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"no readable {MANIFEST}"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, not {expected['bytes']}"
        if _sha256(path) != expected["sha256"]:
            return f"{name} has changed"
    return None


def resolve_checkpoint(path: Path) -> Path:
    """A checkpoint folder from what a person may name: it, a run folder, or its checkpoints folder (the newest valid one).

    Raises: RequestError when there is no valid checkpoint.
    """
    for folder in (path, path / "checkpoints"):
        if (folder / MANIFEST).is_file():
            candidates = [folder]
        else:
            candidates = [folder / f"{PREFIX}{step}" for step in reversed(Checkpoints(folder)._steps())]
        for candidate in candidates:
            damage = damage_of(candidate)
            if damage is None:
                return candidate
            if candidate == path:
                raise RequestError(Problem(f"checkpoint {path} is damaged: {damage}", fix="use another one"))
    raise RequestError(
        Problem(
            f"there is no checkpoint in {path}", fix="name a run folder or a global_step_N folder inside checkpoints/"
        )
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
