"""The disk that the checkpoints of a run need, compared with what is free before its first step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from posttrain.errors import Problem, RequestError
from posttrain.run.checkpoint_folders import steps_in
from posttrain.run.retention import Retention, surplus


def checkpoint_room(folder: Path, rules: Retention, each: int, save_steps: Sequence[int], field: str) -> str | None:
    """Say what the checkpoints still to be written need. None where none will be.

    Args: each, bytes of a checkpoint; save_steps, after which one is written; field, the setting that names ``folder``.
    Raises: RequestError when there is no room for a single one.
    """
    if not save_steps:
        return None
    there = len(steps_in(folder))
    most = _most_at_once(rules, save_steps)
    # What is there goes as new ones come, but a new one is whole before that
    needed = max(1, most - there) * each
    disk = os.statvfs(_existing(folder))
    free = disk.f_bavail * disk.f_frsize
    size = f"{text_of(each)} for each checkpoint, {most} at once at most, in {folder}"
    if each > free:
        what = f"a checkpoint needs {text_of(each)}, and {folder} has {text_of(free)} free"
        fix = f"make room, name another {field}, or save less (checkpoint.save_optimizer=false)"
        raise RequestError(Problem(what, fix=fix, field=field))
    if needed <= free:
        return f"disk: {size} ({text_of(free)} free)"
    last = save_steps[min(len(save_steps), free // each) - 1]
    few = f"checkpoint.keep_last below {most}" if rules.last else "checkpoint.keep_last"
    return (
        f"warning: disk: {size}, which has {text_of(free)} free: the run will stop when it is full, about after step {last}; "
        f"set {few}, or name another {field}"
    )


def text_of(count: int) -> str:
    """A number of bytes for people: 3.7 GB."""
    value = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}" if unit != "bytes" else f"{count} bytes"
        value /= 1000
    return f"{value:.3g} TB"


def _most_at_once(rules: Retention, save_steps: Sequence[int]) -> int:
    """The most checkpoints that lie there at a time: those that the rules keep, and the one that is being written."""
    if rules.last is None:
        return len(save_steps)
    # Those with the best values may be the oldest
    values = dict.fromkeys(save_steps)
    dropped = surplus(values, Retention(last=rules.last, every=rules.every))
    kept = len(save_steps) - len(dropped) + (rules.best or 0)
    return min(len(save_steps), kept + 1)


def _existing(folder: Path) -> Path:
    return next(path for path in [folder, *folder.resolve().parents] if path.exists())
