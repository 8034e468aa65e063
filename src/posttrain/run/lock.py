"""One trainer per folder: a lock that the operating system takes back when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from itertools import chain, repeat
from pathlib import Path

from posttrain.errors import Problem, RequestError
from posttrain.libraries.disk_errors import naming
from posttrain.libraries.folders import make_folder

LOCK = "lock"
PATIENCE_S = 2.0  # a worker of a run that was killed has the lock's file open until it is gone, too


class InUse(RequestError):
    """Another process holds the lock of a folder."""


@contextmanager
def only_trainer(*folders: Path, named_by: Sequence[str] = ()) -> Iterator[list[str]]:
    """Hold the lock of every folder, each once. Yields what a person should know (locks left by processes that died).

    Args: named_by, the setting that names each folder, for messages; run.folder where it is left out.
    Folders are made, and removed at the end if nothing was put into them: a refused request leaves no trace.
    Raises: InUse when another process trains in one of them; RequestError when one cannot be written into.
    """
    with ExitStack() as stack:
        notes: list[str] = []
        held: set[tuple[int, int]] = set()
        for folder, field in zip(folders, chain(named_by, repeat("run.folder")), strict=False):
            folder = folder.resolve()
            stack.enter_context(_made(folder))
            about = folder.stat()
            # By device and number: a folder that is mounted twice has two paths
            if (about.st_dev, about.st_ino) not in held:
                held.add((about.st_dev, about.st_ino))
                stack.enter_context(_locked(folder, field, notes))
        yield notes


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    missing = [path for path in [folder, *folder.parents] if not path.exists()]  # the deepest first
    make_folder(folder)
    try:
        yield
    finally:
        with suppress(OSError):  # something was put into it
            for path in missing:
                path.rmdir()


@contextmanager
def _locked(folder: Path, field: str, notes: list[str]) -> Iterator[None]:
    path = folder / LOCK
    descriptor = _open_locked(path, field)
    try:
        # A run has the lock of its folder and of its checkpoints; one note will do
        if (left := _holder(path)) and not any(f"({left})" in note for note in notes):
            notes.append(f"the lock of a run that died was left in {folder} ({left}); it is taken over")
        about = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        with naming(path):
            os.truncate(descriptor, 0)
            os.write(descriptor, json.dumps(about).encode())
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: whoever opens the name next makes a new file
        os.close(descriptor)


def _open_locked(path: Path, field: str) -> int:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            if time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            what = f"another run is training in {path.parent} ({_holder(path) or 'it has just begun'})"
            fix = f"wait for it, stop it, or name another {field}"
            raise InUse(Problem(what, fix=fix, field=field)) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder removed the name between our two calls: try the new one


def _holder(path: Path) -> str:
    """The writer of a lock, for the user; empty when there is none."""
    try:
        about = json.loads(path.read_text())
        return f"process {about['pid']} on {about['host']} since {about['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
