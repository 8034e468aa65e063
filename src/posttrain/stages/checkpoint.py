"""Checkpoints: folders that are whole or absent.

    RUN_DIR/checkpoints/global_step_N/policy/     a Hugging Face folder, plus the engine's own state
                                     /critic/     the same, of the critic; absent without one
                                     /run.json    step, data position, running statistics of the rewards, best_metric's value
                                     /manifest.json   size and SHA-256 of every file
    RUN_DIR/checkpoints/latest                    the name of the newest one

A checkpoint is written beside (global_step_N.tmp), synced, renamed, and only then pointed at. Which one is newest is told by
the folders that match their manifest, not by the pointer; the pointer is for people and other tools. docs/checkpoints.md
describes what this promises and what its messages mean.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import Problem, RequestError, RunStopped
from posttrain.interfaces.loader import Position
from posttrain.interfaces.train_engine import OptimizedEngine, TrainEngine, ValueEngine
from posttrain.stages import durable
from posttrain.stages.durable import MANIFEST, is_of_the_disk, sync, write_durably, write_manifest
from posttrain.stages.remote import download
from posttrain.stages.retention import Retention, ranked, surplus
from posttrain.stages.saving import BackgroundSave

if TYPE_CHECKING:
    from posttrain.stages.shape_rewards import RewardState
    from posttrain.stages.uploads import Uploads

PREFIX = "global_step_"
RUN_STATE = "run.json"
POINTER = "latest"
BEST = "best"
BESIDE = ".tmp"  # being written
GOING = ".old"  # being deleted
ASIDE = ".aside"  # later than the step that a run was told to go back to
COUNTERS = "engine.json"  # what an engine writes beside its model; with the optimizer's file
OPTIMIZER = "optimizer.safetensors"
DOWNLOADED = "download.tmp"  # what a run starts from that goes on from a URL


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What is saved and restored of an engine besides its weights."""

    save_optimizer: bool = True
    load_optimizer: bool = True
    load_schedule: bool = True


class Checkpoints:
    """The checkpoints of one run.

    Args: ``origin`` is the checkpoint (or run folder, or URL) that the run starts from instead of its own newest one; None goes
        on from that. What the run saves remembers its origin, so that starting the same command again goes on.
    """

    def __init__(
        self,
        folder: Path,
        retention: Retention | None = None,
        origin: Path | str | None = None,
        contents: Contents | None = None,
    ):
        self.folder = folder
        self.contents = contents or Contents()
        self.retention = retention or Retention()
        self.origin = origin
        self.passed_over: list[str] = []  # what ``restore`` found damaged, for the record of the run
        self._uploads: Uploads | None = None
        self._background = BackgroundSave()

    def save(
        self,
        step: int,
        policy: TrainEngine,
        loader: Position,
        critic: ValueEngine | None = None,
        rewards: RewardState | None = None,
        metrics: Mapping[str, float] | None = None,
        *,
        background: bool = False,
    ) -> str:
        """Write the state after ``step``; then drop the checkpoints that nothing keeps. Returns the folder's name.

        With ``background`` it is written while the run goes on: until ``wait`` has returned, it counts as not saved, and the
        models must not change. What is small, such as the data position, is taken now.

        Raises: RunStopped when it cannot be written (no room, a broken disk), or the one before could not be. Nothing is
            deleted before it is whole.
        """
        self.wait()
        kept = self.contents.save_optimizer
        state = {
            "step": step,
            "loader": dict(loader.state()),
            "rewards": rewards.state() if rewards else None,
            "origin": self._origin,
            "best_metric": (metrics or {}).get(self.retention.metric or ""),
            "optimizer": kept,
        }
        engines: dict[str, OptimizedEngine] = {"policy": policy} | ({"critic": critic} if critic else {})
        unfinished: list[Callable[[], None]] = []
        with self._writing(step) as beside:
            shutil.rmtree(beside, ignore_errors=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            needed = sum(engine.saved_bytes() for engine in engines.values())
            self._check_room(step, needed if kept else needed // 3)  # two of three numbers are averages
            for role, engine in engines.items():
                (beside / role).mkdir(parents=True)
                if background:
                    unfinished.append(partial(engine.writer(optimizer=kept), beside / role))
                else:
                    engine.save(beside / role, optimizer=kept)
            (beside / RUN_STATE).write_text(json.dumps(state))
        if not background:
            return self._finish(step, unfinished, lambda: None)
        self._background.begin(partial(self._finish, step, unfinished))
        return f"{PREFIX}{step}"

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is written in the background, and ``wait`` was not called since."""
        return self._background.under_way

    def wait(self) -> str | None:
        """Until the checkpoint that is written in the background is whole. Returns its name; None when there is none.

        Raises: what ``save`` raises when it cannot be written.
        """
        return self._background.wait()

    def give_up(self) -> None:
        """The process is about to end at once: what is being written stays unfinished."""
        self._background.give_up()

    def _finish(self, step: int, unfinished: Sequence[Callable[[], None]], go_on: Callable[[], None]) -> str:
        """``go_on`` is called between the parts of the work, and may end it by an error."""
        name = f"{PREFIX}{step}"
        final = self.folder / name
        with self._writing(step) as beside:
            for finish in unfinished:
                finish()
                go_on()
            write_manifest(beside)
            sync(self.folder)
            go_on()
            if final.exists():  # a damaged one. Dying between these two lines is made good by _tidy: beside is whole.
                shutil.rmtree(final)
            os.replace(beside, final)
            sync(self.folder)
        try:
            write_durably(self.folder / POINTER, name + "\n")
            self._drop_surplus(step)
        except OSError as error:
            what = f"the checkpoint of step {step} is whole, but older ones and {self.folder / POINTER} could not be changed"
            raise RunStopped(f"{what}: {_reason(error)}") from error
        if self._uploads:
            self._uploads.begin(name)
        return name

    @contextmanager
    def _writing(self, step: int) -> Iterator[Path]:
        """Where the checkpoint of a step is written. What a disk that fails has left of it is removed.

        Raises: RunStopped, from inside or instead of what a disk that fails makes libraries raise.
        """
        beside = self.folder / f"{PREFIX}{step}{BESIDE}"
        try:
            yield beside
        except Exception as error:
            if not is_of_the_disk(error):
                raise
            shutil.rmtree(beside, ignore_errors=True)
            what = f"the checkpoint of step {step} could not be written to {self.folder}: {_reason(error)}"
            raise RunStopped(what) from error

    def upload_with(self, uploads: Uploads, step: int) -> None:
        """Upload what is saved from now on, and the checkpoint of ``step``, if it is here and the last run did not get to it."""
        self._uploads = uploads
        uploads.claim(self._origin)
        if (self.folder / f"{PREFIX}{step}").is_dir():
            uploads.begin(f"{PREFIX}{step}")

    def finish_uploads(self, deadline_s: float) -> None:
        """Wait for uploads, and then delete what stayed for them alone."""
        if self._uploads:
            self._uploads.finish(deadline_s)
            if steps := self._steps():
                with suppress(OSError):  # the run is over, and the next one does it
                    self._drop_surplus(steps[-1])

    def restore(
        self,
        policy: TrainEngine,
        loader: Position,
        say: Callable[[str], None],
        critic: ValueEngine | None = None,
        rewards: RewardState | None = None,
    ) -> int:
        """Load the newest valid checkpoint; damaged newer ones are named and passed over. Returns its step, 0 without one.

        Raises: RequestError when there are checkpoints and all are damaged or gone (starting over must be asked for), or when
            this run has a critic and the checkpoint has none.
        """
        self._tidy(say)
        folder = self._newest(say) if self.origin is None else self._newest_from_origin(say)
        if folder is None:
            self._refuse_to_start_over()
            return 0
        if critic and not (folder / "critic").is_dir():
            what = f"{folder} was saved by a run without a critic, and this run needs one"
            fix = "name another run.folder, or go on with the advantage estimator of that run"
            raise RequestError(Problem(what, fix=fix, field="advantage.name"))
        state = read_state(folder)
        wanted, schedule = self.contents.load_optimizer, self.contents.load_schedule
        averages = wanted and bool(state.get("optimizer", True))
        if wanted and not averages:
            say(f"{folder.name} was saved without the optimizer's averages; they start anew")
        policy.load(folder / "policy", optimizer=averages, schedule=schedule)
        if critic:
            critic.load(folder / "critic", optimizer=averages, schedule=schedule)
        loader.restore(state["loader"])
        if rewards and state.get("rewards"):
            rewards.restore(state["rewards"])
        shutil.rmtree(self.folder / DOWNLOADED, ignore_errors=True)
        if folder.parent.resolve() == self.folder.resolve():
            if self.origin is not None:
                self._set_aside(int(state["step"]), say)
            self._put_pointer_right(folder.name, say)
            self._drop_surplus(int(state["step"]))  # which a save that was cut off has left
        return int(state["step"])

    def names(self) -> list[str]:
        """Folder names by step, of damaged ones, too."""
        return [f"{PREFIX}{step}" for step in self._steps()]

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

    @property
    def _origin(self) -> str | None:
        return str(self.origin.resolve()) if isinstance(self.origin, Path) else self.origin

    def _check_room(self, step: int, needed: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise RunStopped(
                f"the checkpoint of step {step} needs {needed:,} bytes and {self.folder} has {free:,} free; nothing was "
                "written or deleted. Make room, or name another checkpoint.folder, and start the run again to go on"
            )

    def _drop_surplus(self, step: int) -> None:
        # Higher numbers are damaged ones that a resumed run went back behind; they must not push out what it saves.
        there = [number for number in self._steps() if number <= step]
        rules = self.retention
        values = {number: _metric_of(self.folder / f"{PREFIX}{number}") if rules.best else None for number in there}
        for old in surplus(values, rules):
            if not (self._uploads and self._uploads.reads(f"{PREFIX}{old}")):
                self._delete(self.folder / f"{PREFIX}{old}")
        if rules.best and (best := ranked(values, rules.mode)):
            write_durably(self.folder / BEST, f"{PREFIX}{best[0]}\n")

    def _delete(self, folder: Path) -> None:
        """Renamed first: a deletion that is cut off leaves no folder that looks like a damaged checkpoint."""
        going = folder.with_name(folder.name + GOING)
        shutil.rmtree(going, ignore_errors=True)
        os.replace(folder, going)
        shutil.rmtree(going)

    def _tidy(self, say: Callable[[str], None]) -> None:
        """Finish or remove what a process that was killed left half done."""
        for path in [*self._named(GOING), *self.folder.glob(DOWNLOADED)]:
            shutil.rmtree(path)
        for path in self._named(BESIDE):
            final = path.with_name(path.name.removesuffix(BESIDE))
            if damage_of(path) is None and damage_of(final) is not None:
                shutil.rmtree(final, ignore_errors=True)
                os.replace(path, final)
                sync(self.folder)
                say(f"checkpoint {final.name} was whole but not in its place when the run was cut off; it is now")
            else:
                shutil.rmtree(path)

    def _newest(self, say: Callable[[str], None], origin: str | None = None) -> Path | None:
        """The newest valid checkpoint here; with ``origin``, of those that a run from there has saved."""
        for step in reversed(self._steps()):
            folder = self.folder / f"{PREFIX}{step}"
            damage = damage_of(folder)
            if damage:
                self.passed_over.append(f"{folder.name}: {damage}")
                say(f"checkpoint {folder.name} is damaged ({damage}); trying the one before")
            elif origin is None or read_state(folder).get("origin") == origin:
                return folder
        return None

    def _newest_from_origin(self, say: Callable[[str], None]) -> Path:
        assert self.origin is not None
        if own := self._newest(say, self._origin):
            return own
        start = None if isinstance(self.origin, str) else resolve_checkpoint(self.origin, field="run.resume_path")
        if self.exist() and (start is None or start.parent.resolve() != self.folder.resolve()):
            what = f"{self.folder} holds checkpoints of a run that did not start from {self.origin}"
            raise RequestError(Problem(what, fix="name another run.folder", field="run.resume_path"))
        if start is None:
            start = download(str(self.origin), self.folder / DOWNLOADED, say, field="run.resume_path")
            say(f"copied {start.name} from {self.origin}")
        return start

    def _set_aside(self, step: int, say: Callable[[str], None]) -> None:
        """Checkpoints of later steps are of the course that was left; under another name they are in nobody's way."""
        for later in [number for number in self._steps() if number > step]:
            folder = self.folder / f"{PREFIX}{later}"
            if _origin_of(folder) == self._origin:
                continue  # damaged ones of this course are passed over, as everywhere
            taken = len(list(self.folder.glob(f"{folder.name}{ASIDE}*")))
            aside = folder.with_name(f"{folder.name}{ASIDE}{taken + 1}")
            os.replace(folder, aside)
            say(f"the run goes back to step {step}: checkpoint {folder.name} is kept as {aside.name}")

    def _put_pointer_right(self, newest: str, say: Callable[[str], None]) -> None:
        pointer = self.folder / POINTER
        said = _text(pointer)
        if said != newest:
            what = f"named {said!r}" if said is not None else "was not readable"
            say(f"{pointer} {what}; the newest valid checkpoint is {newest}, which it names now")
            write_durably(pointer, newest + "\n")

    def _refuse_to_start_over(self) -> None:
        fix = "put back a copy, or name another run.folder to start over"
        if self.exist():
            raise RequestError(Problem(f"every checkpoint in {self.folder} is damaged", fix=fix, field="run.folder"))
        if said := _text(self.folder / POINTER):
            what = f"{self.folder / POINTER} names {said}, and there is no checkpoint beside it any more"
            raise RequestError(Problem(what, fix=fix, field="run.folder"))

    def _steps(self) -> list[int]:
        return sorted(int(path.name.removeprefix(PREFIX)) for path in self._named(""))

    def _named(self, suffix: str) -> Iterator[Path]:
        """Paths called global_step_N and the suffix."""
        for path in sorted(self.folder.glob(f"{PREFIX}*{suffix}")) if self.folder.is_dir() else ():
            if path.name.removeprefix(PREFIX).removesuffix(suffix).isdecimal():
                yield path


def damage_of(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None when every file is as its manifest says."""
    return durable.damage_of(folder, required=[RUN_STATE])


def read_state(folder: Path) -> dict[str, Any]:
    """run.json of a valid checkpoint."""
    state: dict[str, Any] = json.loads((folder / RUN_STATE).read_text())
    return state


def resolve_checkpoint(path: Path, *, field: str = "") -> Path:
    """A checkpoint folder from what a person may name: it, a run folder, or its checkpoints folder (the newest valid one).

    Raises: RequestError when there is no valid checkpoint; ``field`` is the setting that named the path.
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
                what = f"checkpoint {path} is damaged: {damage}"
                raise RequestError(Problem(what, fix="use another one", field=field))
    what, fix = f"there is no checkpoint in {path}", "name a run folder or a global_step_N folder inside checkpoints/"
    if any(path.glob("**/model_world_size_*_rank_*.pt")):
        what += " that this program wrote, but shards of another trainer"
        fix = f"merge them (posttrain export {path} OUT_DIR) and start from the result with model.path"
    raise RequestError(Problem(what, fix=fix, field=field))


def _metric_of(folder: Path) -> float | None:
    """What best_metric was at a checkpoint, as it says itself; so nothing about it has to be remembered elsewhere."""
    try:
        value = read_state(folder).get("best_metric")
    except (OSError, ValueError):
        return None  # a damaged one is no one's best
    return float(value) if isinstance(value, int | float) else None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _origin_of(folder: Path) -> str | None:
    try:
        return read_state(folder).get("origin")
    except (OSError, ValueError):
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
