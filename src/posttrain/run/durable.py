"""Files that are whole or absent, whatever instant the process or the machine dies at, and folders that can prove it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError

from posttrain.libraries.disk_errors import naming

MANIFEST = "manifest.json"


def write_durably(path: Path, text: str) -> None:
    """Replace a text file as ``replace_durably`` does."""
    replace_durably(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def replace_durably(path: Path, write: Callable[[Path], object]) -> None:
    """Replace a file by the one that ``write`` writes at a path beside it: a reader, or whoever comes after a crash, sees the old
    content or the new, never a part."""
    beside = path.with_name(path.name + ".tmp")
    with naming(path):
        try:
            write(beside)
            sync(beside)
            os.replace(beside, path)
        except OSError:
            with suppress(OSError):
                beside.unlink()
            raise
        sync(path.parent)


def is_of_the_disk(error: Exception) -> bool:
    """True for an error of writing to a disk. The library tokenizers raises Exception itself for that."""
    return isinstance(error, OSError | SafetensorError) or type(error) is Exception


def sync(path: Path) -> None:
    """Return when a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def same_mode(folder: Path) -> None:
    """Give every file below ``folder`` the mode that new files of this process have: libraries write weights for the owner alone,
    beside files that all may read."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_mode & 0o777 != mode:
            path.chmod(mode)


def write_manifest(folder: Path) -> None:
    """Record size and hash of every file below ``folder``, and sync them all to disk. The manifest comes last."""
    same_mode(folder)
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        files[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        sync(path)
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"files": files}, indent=1))
    sync(manifest)
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        sync(path)


def damage_of(folder: Path, required: Collection[str] = ()) -> str | None:
    """The damage of a folder, in words; None when every file is as its manifest says and ``required`` ones are listed in it."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        listed = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"no readable {MANIFEST}"
    if lacking := [name for name in required if name not in listed]:
        return f"{MANIFEST} does not list {lacking[0]}"
    for name, (size, sha256) in listed.items():
        path = folder / name
        try:
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes, not {size}"
            if _sha256(path) != sha256:
                return f"{name} has changed"
        except OSError as error:  # a disk that cannot read it back
            return f"{name} cannot be read: {error.strerror}"
    return None


def different(copy: Path, original: Path, part: str) -> str | None:
    """The first file of ``copy`` that is not what the manifest of ``original`` says of it in ``part``; None when all are."""
    files = json.loads((original / MANIFEST).read_text())["files"]
    for path in sorted(path for path in copy.rglob("*") if path.is_file()):
        name = f"{part}/{path.relative_to(copy)}"
        if _sha256(path) != files[name]["sha256"]:
            return name
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
