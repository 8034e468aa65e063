"""Files in a folder of checkpoints: their names, which of them are whole, and leftovers of a process that was killed.

    RUN_DIR/checkpoints/global_step_N/policy/     a Hugging Face folder, plus the engine's own state
                                     /critic/     the same, of the critic; absent without one
                                     /run.json    step, data position, running statistics of the rewards, best_metric's value,
                                                   steps in a row without an update
                                     /manifest.json   size and SHA-256 of every file
    RUN_DIR/checkpoints/latest                    the name of the newest one
                       /owner.json                the run that saves here (run.ownership)

The newest one is found by the folders that match their manifest, not by the pointer; the pointer is for people and other
tools.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from posttrain.errors import Problem, RequestError
from posttrain.run import durable
from posttrain.run.durable import MANIFEST, sync, write_durably

PREFIX = "global_step_"
RUN_STATE = "run.json"
AHEAD = "ahead.json"  # groups that an asynchronous run has sampled for later steps
AHEAD_FILES = "ahead"  # weights of which a batch is still to be sampled (steps.one_step)
POINTER = "latest"
BEST = "best"
BESIDE = ".tmp"  # being written
GOING = ".old"  # being deleted
ASIDE = ".aside"  # later than the step that a run went back to
COUNTERS = "engine.json"  # what an engine writes beside its model; with the optimizer's file
OPTIMIZER = "optimizer.safetensors"
DOWNLOADED = "download.tmp"  # the checkpoint of a run that starts from a URL


def steps_in(folder: Path) -> list[int]:
    """The steps of all checkpoints in a folder, of damaged ones, too; ascending."""
    return sorted(int(path.name.removeprefix(PREFIX)) for path in _named(folder, ""))


def damage_of(checkpoint: Path) -> str | None:
    """The damage of a checkpoint, in words; None when every file is as its manifest says."""
    return durable.damage_of(checkpoint, required=[RUN_STATE])


def read_state(checkpoint: Path) -> dict[str, Any]:
    """run.json of a valid checkpoint."""
    state: dict[str, Any] = json.loads((checkpoint / RUN_STATE).read_text())
    return state


def metric_of(checkpoint: Path) -> float | None:
    """The value of best_metric at a checkpoint, read from the checkpoint itself."""
    value = _said(checkpoint, "best_metric")  # a damaged one is never best
    return float(value) if isinstance(value, int | float) else None


def is_idle(checkpoint: Path) -> bool:
    """True if the step of a checkpoint made no update. It is resumed like any other, but counts neither as good nor as best."""
    return bool(_said(checkpoint, "idle_steps"))


def resolve_checkpoint(path: Path, *, field: str = "") -> Path:
    """A checkpoint folder from what a person may name: it, a run folder, or its checkpoints folder (the newest valid one).

    Raises: RequestError when there is no valid checkpoint; ``field`` is the setting that named the path.
    """
    damaged = []
    for folder in (path, path / "checkpoints"):
        if (folder / MANIFEST).is_file():
            candidates = [folder]
        else:
            candidates = [folder / f"{PREFIX}{step}" for step in reversed(steps_in(folder))]
        for candidate in candidates:
            damage = damage_of(candidate)
            if damage is None:
                return candidate
            if candidate == path:
                what = f"checkpoint {path} is damaged: {damage}"
                raise RequestError(Problem(what, fix="use another one", field=field))
            damaged.append(f"{candidate.name}: {damage}")
    if damaged:
        what = f"every checkpoint in {path} is damaged ({damaged[0]})"
        raise RequestError(Problem(what, fix=f"posttrain checkpoints {path} lists them", field=field))
    what, fix = f"there is no checkpoint in {path}", "name a run folder or a global_step_N folder inside checkpoints/"
    if any(path.glob("**/model_world_size_*_rank_*.pt")):
        what += " that this program wrote, but shards of another trainer"
        fix = f"merge them (posttrain export {path} OUT_DIR) and start from the result with model.path"
    raise RequestError(Problem(what, fix=fix, field=field))


def delete(checkpoint: Path) -> None:
    """Renamed first: a deletion that is cut off leaves no folder that looks like a damaged checkpoint."""
    going = checkpoint.with_name(checkpoint.name + GOING)
    shutil.rmtree(going, ignore_errors=True)
    os.replace(checkpoint, going)
    shutil.rmtree(going)


def tidy(folder: Path, say: Callable[[str], None]) -> None:
    """Finish or remove what a process that was killed left half done."""
    for path in [*_named(folder, GOING), *folder.glob(DOWNLOADED)]:
        shutil.rmtree(path)
    for path in _named(folder, BESIDE):
        final = path.with_name(path.name.removesuffix(BESIDE))
        if damage_of(path) is None and damage_of(final) is not None:
            shutil.rmtree(final, ignore_errors=True)
            os.replace(path, final)
            sync(folder)
            say(f"checkpoint {final.name} was whole but not in its place when the run was cut off; it is now")
        else:
            shutil.rmtree(path)


def set_aside(folder: Path, step: int, origin: str | None, say: Callable[[str], None]) -> None:
    """Checkpoints of later steps than ``step`` are of the course that was left: they are renamed."""
    for later in [number for number in steps_in(folder) if number > step]:
        checkpoint = folder / f"{PREFIX}{later}"
        if _said(checkpoint, "origin") == origin:
            continue  # damaged ones of this course are passed over, as everywhere
        say(f"the run goes back to step {step}: checkpoint {checkpoint.name} is kept as {_rename_aside(checkpoint)}")


def put_pointer_right(folder: Path, newest: str, say: Callable[[str], None]) -> None:
    pointer = folder / POINTER
    said = _text(pointer)
    if said != newest:
        what = f"named {said!r}" if said is not None else "was not readable"
        say(f"{pointer} {what}; the newest valid checkpoint is {newest}, which it names now")
        write_durably(pointer, newest + "\n")


def is_used(folder: Path) -> bool:
    """True if something was saved into a folder of checkpoints, be it damaged or deleted since."""
    return bool(steps_in(folder)) or (folder / POINTER).exists()


def set_all_aside(folder: Path, say: Callable[[str], None]) -> None:
    """Rename all checkpoints, none of which is valid, for a run that starts over."""
    for step in steps_in(folder):
        say(f"the run starts over: checkpoint {PREFIX}{step} is kept as {_rename_aside(folder / f'{PREFIX}{step}')}")
    for pointer in (POINTER, BEST):
        (folder / pointer).unlink(missing_ok=True)


def _rename_aside(checkpoint: Path) -> str:
    taken = len(list(checkpoint.parent.glob(f"{checkpoint.name}{ASIDE}*")))
    aside = checkpoint.with_name(f"{checkpoint.name}{ASIDE}{taken + 1}")
    os.replace(checkpoint, aside)
    return aside.name


def refuse_to_start_over(folder: Path) -> None:
    """Raises: RequestError where a folder without a valid checkpoint had one: starting over takes another folder."""
    fix = "put back a copy, or name another run.folder to start over (or add --start-over, which keeps what is there)"
    if steps_in(folder):
        raise RequestError(Problem(f"every checkpoint in {folder} is damaged", fix=fix, field="run.folder"))
    if said := _text(folder / POINTER):
        what = f"{folder / POINTER} names {said}, and there is no checkpoint beside it any more"
        raise RequestError(Problem(what, fix=fix, field="run.folder"))


def _named(folder: Path, suffix: str) -> Iterator[Path]:
    """Paths called global_step_N and the suffix."""
    for path in sorted(folder.glob(f"{PREFIX}*{suffix}")) if folder.is_dir() else ():
        if path.name.removeprefix(PREFIX).removesuffix(suffix).isdecimal():
            yield path


def _said(checkpoint: Path, key: str) -> Any:
    """A value in run.json; None where that cannot be read."""
    try:
        return read_state(checkpoint).get(key)
    except (OSError, ValueError):
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
