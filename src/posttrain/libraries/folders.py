"""Folders that are written into."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryFile

from posttrain.errors import Problem, RequestError


def user_cache() -> Path:
    """Where this package keeps what it can make again. Raises: RuntimeError for a user without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "posttrain"


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, and see that a file can be written there; one that is there already may hold others.

    Raises: RequestError that names the folder, whatever the operating system has against it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        what = f"nothing can be written into the folder {folder}: {error.strerror or error}"
        raise RequestError(Problem(what, fix="name another folder, or change who may write there")) from None
