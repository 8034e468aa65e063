"""What git-lfs leaves in the place of large files that it has not fetched."""

from __future__ import annotations

from pathlib import Path


def without_git_lfs(path: str) -> str:
    """What to do where a model's folder holds pointers in the place of its weights; empty where it does not."""
    folder = Path(path).expanduser()
    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        with file.open("rb") as stream:
            if stream.read(40).startswith(b"version https://git-lfs"):
                return f"{file.name} is a pointer of git-lfs: fetch the weights with git lfs pull"
    return ""
