"""Creation of the folders that are written to."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryFile

from posttrain.errors import Problem, RequestError


def user_cache() -> Path:
    """Return the folder for files that this package can recreate. Raises: RuntimeError for a user without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "posttrain"


def make_folder(folder: Path) -> None:
    """Create a folder with its parents, and check that a file can be written there. An existing folder may hold other files.

    Raises: RequestError that names the folder, for any error of the operating system.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        what = f"nothing can be written into the folder {folder}: {error.strerror or error}"
        raise RequestError(Problem(what, fix="name another folder, or change who may write there")) from None
