"""Detection of git-lfs pointers, which stand in place of large files that were not fetched."""

from __future__ import annotations

from pathlib import Path


def without_git_lfs(path: str) -> str:
    """Return the fix for a model folder that holds pointers instead of weights; "" for other folders."""
    folder = Path(path).expanduser()
    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        with file.open("rb") as stream:
            if stream.read(40).startswith(b"version https://git-lfs"):
                return f"{file.name} is a pointer of git-lfs: fetch the weights with git lfs pull"
    return ""
