"""The checkpoints of a run: engines and positions saved, restored, kept and dropped. Folders are whole or absent.

A checkpoint is written beside (global_step_N.tmp), synced, renamed, and only then pointed at. run.checkpoint_folders says what
lies where; docs/checkpoints.md describes what this promises and what its messages mean.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from posttrain.errors import Problem, RequestError, RunStopped
from posttrain.interfaces.train_engine import OptimizedEngine
from posttrain.run.checkpoint_folders import (
    AHEAD,
    AHEAD_FILES,
    BESIDE,
    BEST,
    DOWNLOADED,
    POINTER,
    PREFIX,
    RUN_STATE,
    damage_of,
    delete,
    is_idle,
    metric_of,
    put_pointer_right,
    read_state,
    refuse_to_start_over,
    resolve_checkpoint,
    set_all_aside,
    set_aside,
    steps_in,
    tidy,
)
from posttrain.run.durable import MANIFEST, is_of_the_disk, sync, write_durably, write_manifest
from posttrain.run.progress import Progress
from posttrain.run.remote import download
from posttrain.run.retention import Retention, ranked, surplus
from posttrain.run.saving import BackgroundSave
from posttrain.run.uploads import Uploads


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The parts of an engine's state, besides its weights, that are saved and restored."""

    save_optimizer: bool = True
    sharded: bool = False  # every process writes its own part
    load_optimizer: bool = True
    load_schedule: bool = True


class Checkpoints:
    """The checkpoints of one run.

    Args: ``origin`` is the checkpoint (or run folder, or URL) that the run starts from instead of its own newest one; None
        resumes from that. Checkpoints of the run name its origin, so that starting the same command again resumes from them.
    """

    def __init__(
        self,
        folder: Path,
        retention: Retention | None = None,
        origin: Path | str | None = None,
        contents: Contents | None = None,
        *,
        start_over: bool = False,
        on_saved: Callable[[str], None] | None = None,
        after_save: Callable[[int, Path], None] | None = None,
    ):
        self.folder = folder
        self._start_over = start_over
        self._on_saved = on_saved
        self._after_save = after_save  # called with the step and its folder, when the folder is complete
        self.contents = contents or Contents()
        self.retention = retention or Retention()
        self.origin = origin
        self.passed_over: list[str] = []  # damaged ones that ``restore`` found, for the record of the run
        self._uploads: Uploads | None = None
        self._background = BackgroundSave()

    def save(
        self,
        step: int,
        progress: Progress,
        metrics: Mapping[str, float] | None = None,
        *,
        background: bool = False,
    ) -> str:
        """Write the state after ``step``; then drop the checkpoints that nothing keeps. Returns the folder's name.

        With ``background`` it is written while the run continues: until ``wait`` has returned, it counts as not saved, and the
        models must not change. What is small, such as the data position, is taken now.

        Raises: RunStopped when it cannot be written (no room, a broken disk), or the one before could not be. Nothing is
            deleted before it is whole.
        """
        self.wait()
        kept, sharded = self.contents.save_optimizer, self.contents.sharded
        with progress.still():
            position = dict(progress.loader.state())
            ahead = json.dumps(progress.ahead.state()) if progress.ahead else None
        state = {
            "step": step,
            "loader": position,
            "rewards": progress.rewards.state() if progress.rewards else None,
            "idle_steps": progress.idle_steps,
            "origin": self._origin,
            "best_metric": (metrics or {}).get(self.retention.metric or ""),
            "optimizer": kept,
        }
        engines = progress.engines
        unfinished: list[Callable[[], None]] = []
        with self._writing(step) as beside:
            shutil.rmtree(beside, ignore_errors=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            self._check_room(step, self.bytes_of(engines.values()))
            for role, engine in engines.items():
                (beside / role).mkdir(parents=True)
                if background or sharded:
                    unfinished.append(partial(engine.writer(optimizer=kept, sharded=sharded), beside / role))
                else:
                    engine.save(beside / role, optimizer=kept)
            (beside / RUN_STATE).write_text(json.dumps(state))
            if ahead is not None:
                (beside / AHEAD).write_text(ahead)
            if progress.ahead and progress.ahead.folder and progress.ahead.folder.is_dir():
                shutil.copytree(progress.ahead.folder, beside / AHEAD_FILES)
        if not background:
            return self._finish(step, unfinished, lambda: None)
        self._background.begin(partial(self._finish, step, unfinished))
        return f"{PREFIX}{step}"

    @property
    def saving(self) -> bool:
        """True while a checkpoint is written in the background, until ``wait`` is called."""
        return self._background.under_way

    def wait(self) -> str | None:
        """Wait until the checkpoint that is written in the background is whole. Returns its name; None when there is none.

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
            if final.exists():  # a damaged one. Dying between these two lines is made good by tidy: beside is whole.
                shutil.rmtree(final)
            os.replace(beside, final)
            sync(self.folder)
        try:
            write_durably(self.folder / POINTER, name + "\n")
            if self._on_saved:
                self._on_saved(name)
            self._drop_surplus(step)
        except OSError as error:
            what = f"the checkpoint of step {step} is whole, but older ones and {self.folder / POINTER} could not be changed"
            raise RunStopped(f"{what}: {_reason(error)}") from error
        self._upload(name)
        if self._after_save:
            self._after_save(step, final)
        return name

    @contextmanager
    def _writing(self, step: int) -> Iterator[Path]:
        """The folder in which the checkpoint of a step is written. Leftovers of a disk that fails are removed.

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
            self._upload(f"{PREFIX}{step}")

    def _upload(self, name: str) -> None:
        """Copy a checkpoint, unless its step made no update: it would push good ones out there."""
        if self._uploads and not is_idle(self.folder / name):
            self._uploads.begin(name)

    def finish_uploads(self, deadline_s: float) -> None:
        """Wait for uploads, and then delete what stayed for them alone."""
        if self._uploads:
            self._uploads.finish(deadline_s)
            if steps := steps_in(self.folder):
                with suppress(OSError):  # the run is over, and the next one does it
                    self._drop_surplus(steps[-1])

    def tidy(self, say: Callable[[str], None]) -> None:
        """Finish or remove what a killed process left half done. To be called before anyone asks which checkpoints ``exist``."""
        tidy(self.folder, say)

    def restore(self, progress: Progress, say: Callable[[str], None]) -> int:
        """Load the newest valid checkpoint; damaged newer ones are named and passed over. Returns its step, 0 without one.

        Raises: RequestError when there are checkpoints and all are damaged or gone (starting over takes another run.folder), or
            when this run has a critic and the checkpoint has none.
        """
        self.tidy(say)
        if self._start_over:
            self._leave_damaged(say)
        folder = self._newest(say) if self.origin is None else self._newest_from_origin(say)
        if folder is None:
            refuse_to_start_over(self.folder)
            return 0
        if progress.critic and not (folder / "critic").is_dir():
            what = f"{folder} was saved by a run without a critic, and this run needs one"
            fix = "name another run.folder, or go on with the advantage estimator of that run"
            raise RequestError(Problem(what, fix=fix, field="advantage.name"))
        if progress.process_reward and not (folder / "process_reward").is_dir():
            what = f"{folder} was saved by a run without a process reward model, and this run has one"
            raise RequestError(Problem(what, fix="name another run.folder", field="reward.process"))
        state = read_state(folder)
        wanted, schedule = self.contents.load_optimizer, self.contents.load_schedule
        averages = wanted and bool(state.get("optimizer", True))
        if wanted and not averages:
            say(f"{folder.name} was saved without the optimizer's averages; they start at 0")
        for role, engine in progress.engines.items():
            engine.load(folder / role, optimizer=averages, schedule=schedule)
        progress.loader.restore(state["loader"])
        if progress.rewards and state.get("rewards"):
            progress.rewards.restore(state["rewards"])
        saved = json.loads((folder / AHEAD).read_text()) if (folder / AHEAD).is_file() else None
        if progress.ahead and saved:
            progress.ahead.restore(saved)
            if progress.ahead.folder:
                shutil.rmtree(progress.ahead.folder, ignore_errors=True)
                if (folder / AHEAD_FILES).is_dir():
                    shutil.copytree(folder / AHEAD_FILES, progress.ahead.folder)
        elif progress.ahead:
            progress.ahead.start_after(int(state["step"]))
        elif saved:
            say(f"{folder.name} was saved by an asynchronous run: the groups that it had sampled ahead are left out")
        progress.idle_steps = int(state.get("idle_steps", 0))  # an earlier version did not save it
        shutil.rmtree(self.folder / DOWNLOADED, ignore_errors=True)
        if folder.parent.resolve() == self.folder.resolve():
            if self.origin is not None:
                set_aside(self.folder, int(state["step"]), self._origin, say)
            put_pointer_right(self.folder, folder.name, say)
            self._drop_surplus(int(state["step"]))  # which a save that was cut off has left
        return int(state["step"])

    def _leave_damaged(self, say: Callable[[str], None]) -> None:
        """Set aside what is here when none of it is valid; otherwise report that the run does not start over."""
        valid = next((step for step in reversed(steps_in(self.folder)) if self.holds(step)), None)
        if valid is None:
            set_all_aside(self.folder, say)
        else:
            say(
                f"--start-over has no effect: {self.folder} holds {PREFIX}{valid}. Name another run.folder to start over"
            )

    def exist(self) -> bool:
        """True if there is any checkpoint, valid or not."""
        return bool(steps_in(self.folder))

    def holds(self, step: int) -> bool:
        """True if the checkpoint of this step is there and not damaged."""
        return damage_of(self.folder / f"{PREFIX}{step}") is None

    def bytes_of(self, engines: Iterable[OptimizedEngine]) -> int:
        """The size of a checkpoint of these engines."""
        needed = sum(engine.saved_bytes() for engine in engines)
        # Two of three numbers are averages
        return needed if self.contents.save_optimizer else needed // 3

    def written_s(self, step: int) -> float | None:
        """The time at which the checkpoint of a step was whole, in seconds of Unix time; None when there is none here."""
        manifest = self.folder / f"{PREFIX}{step}" / MANIFEST
        return manifest.stat().st_mtime if manifest.is_file() else None

    def last_good_name(self) -> str | None:
        """Folder name of the newest checkpoint that is not damaged and was saved after a step that made an update."""
        names = (f"{PREFIX}{step}" for step in reversed(steps_in(self.folder)))
        return next((name for name in names if self._is_good(self.folder / name)), None)

    @staticmethod
    def _is_good(checkpoint: Path) -> bool:
        return damage_of(checkpoint) is None and not is_idle(checkpoint)

    @property
    def _origin(self) -> str | None:
        return str(self.origin.resolve()) if isinstance(self.origin, Path) else self.origin

    def _check_room(self, step: int, needed: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise RunStopped(
                f"the checkpoint of step {step} needs {needed:,} bytes and {self.folder} has {free:,} free; nothing was "
                "written or deleted. Make room, or name another checkpoint.folder, and start the run again to resume"
            )

    def _drop_surplus(self, step: int) -> None:
        # Higher numbers are damaged ones that a resumed run went back behind; they must not push out what it saves.
        there = [number for number in steps_in(self.folder) if number <= step]
        rules = self.retention
        idle = {number for number in there if is_idle(self.folder / f"{PREFIX}{number}")}
        values = {number: metric_of(self.folder / f"{PREFIX}{number}") if rules.best else None for number in there}
        for old in surplus(values, rules, idle):
            if not (self._uploads and self._uploads.reads(f"{PREFIX}{old}")):
                delete(self.folder / f"{PREFIX}{old}")
        values = {number: value for number, value in values.items() if number not in idle}
        if rules.best and (best := ranked(values, rules.mode)):
            write_durably(self.folder / BEST, f"{PREFIX}{best[0]}\n")

    def _newest(self, say: Callable[[str], None], origin: str | None = None) -> Path | None:
        """The newest valid checkpoint here; with ``origin``, of those that a run from there has saved."""
        for step in reversed(steps_in(self.folder)):
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


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
