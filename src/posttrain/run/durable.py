"""Files that are whole or absent, whatever instant the process or the machine dies at, and folders that can prove it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from posttrain.libraries.disk_errors import naming

MANIFEST = "manifest.json"
_NOTED = ".hashed"  # of a note beside a file, until the manifest is written
_HASHED_AT_ONCE = min(8, os.cpu_count() or 1)
_IN_THREADS_BYTES = 64 << 20


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


def note_hashes(written: Iterable[Path]) -> None:
    """Sync files that this process has written, and note size and hash beside each, for ``write_manifest`` in whichever process:
    of files written by many, each process reads its own again, and only a machine that has written a file can sync it."""
    for path in written:
        sync(path)
        _note(path).write_text(json.dumps(_entry(path)))


def write_manifest(folder: Path) -> None:
    """Record size and hash of every file below ``folder``, and sync them all to disk. The manifest comes last.

    What ``note_hashes`` has noted of a file is taken from there, and the note is removed.
    """
    same_mode(folder)
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != _NOTED)
    with _each(len(paths), sum(path.stat().st_size for path in paths)) as each:
        entries = list(each(_synced_entry, paths))
    files = {str(path.relative_to(folder)): entry for path, entry in zip(paths, entries, strict=True)}
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
    for name, (size, _) in listed.items():
        path = folder / name
        try:
            if not path.is_file():
                return f"{name} is missing"
            if (found := path.stat().st_size) != size:
                return f"{name} has {found} bytes, not {size}"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"

    def changed(name: str) -> str | None:
        try:
            return f"{name} has changed" if _sha256(folder / name) != listed[name][1] else None
        except OSError as error:  # a disk that cannot read it back
            return f"{name} cannot be read: {error.strerror}"

    with _each(len(listed), sum(size for size, _ in listed.values())) as each:
        return next(filter(None, each(changed, listed)), None)


def different(copy: Path, original: Path, part: str) -> str | None:
    """The first file of ``copy`` that is not what the manifest of ``original`` says of it in ``part``; None when all are."""
    files = json.loads((original / MANIFEST).read_text())["files"]
    for path in sorted(path for path in copy.rglob("*") if path.is_file()):
        name = f"{part}/{path.relative_to(copy)}"
        if _sha256(path) != files[name]["sha256"]:
            return name
    return None


@contextmanager
def _each(files: int, size: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """Yield ``map``, in threads where there is much to hash, which leaves Python to others. What was not begun when the result is
    no longer read is dropped, and no thread holds up the end of the process.

    Args: size in bytes, of all files.
    """
    if files < 2 or size < _IN_THREADS_BYTES:
        yield map
        return
    with ThreadPool(_HASHED_AT_ONCE) as threads:
        yield threads.imap


def _note(path: Path) -> Path:
    return path.with_name(f".{path.name}{_NOTED}")


def _entry(path: Path) -> dict[str, int | str]:
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _synced_entry(path: Path) -> dict[str, int | str]:
    note = _note(path)
    if note.exists():
        entry: dict[str, int | str] = json.loads(note.read_text())
        note.unlink()
        if entry["bytes"] == path.stat().st_size:
            return entry
    sync(path)
    return _entry(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
