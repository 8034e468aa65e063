"""The folder of a cluster of a run's own. One whose driver was killed is removed when the next cluster starts."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from posttrain.processes import proc

PREFIX = "pt-ray-"
LONGEST_PARENT = 28  # bytes
DRIVER = "driver.json"  # the process that the cluster ends with


def new_folder() -> str:
    """Make a folder for Ray's files. Those of drivers that are gone are removed first."""
    parent = _short_parent()
    for folder in Path(parent).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another run removes it, too
            _remove_left(folder)
    made = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
    if (here := _place(os.getpid())) is not None:
        Path(made, DRIVER).write_text(json.dumps(here))
    return made


def remove(folder: str) -> None:
    """Remove it with all that Ray has left there."""
    shutil.rmtree(folder, ignore_errors=True)


def _remove_left(folder: Path) -> None:
    """Remove a folder whose driver was a process of this machine, and is gone. The name of the driver goes last, because Ray's
    processes may write for some seconds more."""
    try:
        driver = json.loads((folder / DRIVER).read_text())
    except (OSError, ValueError):
        return  # of another user, of an earlier version, or just being made
    if _place(driver["pid"]) == driver or driver | _namespace() != driver:
        return
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != DRIVER:
            with suppress(OSError):
                entry.unlink()
    if [each.name for each in folder.iterdir()] == [DRIVER]:
        shutil.rmtree(folder, ignore_errors=True)


def _place(pid: int) -> dict[str, Any] | None:
    """A process among all that have been; None when it is gone, or the system does not say."""
    begun = proc.started(pid)
    return None if begun is None else {"pid": pid, "started": begun, **_namespace()}


def _namespace() -> dict[str, Any]:
    """Name the space of process numbers: containers may share a folder, and not their numbers."""
    try:
        numbers = os.readlink("/proc/self/ns/pid")
    except OSError:
        numbers = ""
    return {"host": socket.gethostname(), "numbers": numbers}


def _short_parent() -> str:
    """Return a folder for sockets, whose names, with Ray's additions, may have at most 107 bytes."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= LONGEST_PARENT else "/tmp"
