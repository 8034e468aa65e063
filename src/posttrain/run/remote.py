"""Checkpoints in a folder elsewhere.

    URL/global_step_N/...              the files of the checkpoint, its manifest.json last
    URL/latest                         the name of the newest one, written after that
    URL/run                            which run writes here

A checkpoint there is valid when its manifest is there and every file has the size that it says; the hashes are compared when
it has been copied back.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from posttrain.errors import Problem, RequestError
from posttrain.libraries.remote import RemoteFolder
from posttrain.run.durable import MANIFEST, damage_of

PREFIX = "global_step_"
POINTER = "latest"
RUN_STATE = "run.json"


@dataclass(frozen=True, slots=True)
class RemoteCheckpoint:
    """The files below URL/global_step_N."""

    name: str
    step: int
    files: Mapping[str, int]  # size in bytes by name

    @property
    def complete(self) -> bool:
        """True once its manifest is there, which comes last."""
        return MANIFEST in self.files

    @property
    def total_bytes(self) -> int:
        return sum(self.files.values())


def checkpoints_in(folder: RemoteFolder) -> list[RemoteCheckpoint]:
    """All checkpoints of a remote folder, whole or not, by step."""
    found: dict[str, dict[str, int]] = {}
    for name, size in folder.files().items():
        top, _, rest = name.partition("/")
        if rest and top.removeprefix(PREFIX).isdecimal() and top.startswith(PREFIX):
            found.setdefault(top, {})[rest] = size
    all_of_them = [RemoteCheckpoint(name, int(name.removeprefix(PREFIX)), files) for name, files in found.items()]
    return sorted(all_of_them, key=lambda one: one.step)


def upload(folder: RemoteFolder, local: Path) -> None:
    """Copy a valid checkpoint there, unless it is there already, and point at it.

    Raises: whatever the protocol's library does; what is there then has no manifest, or is what was there before.
    """
    manifest = (local / MANIFEST).read_bytes()
    if folder.read(f"{local.name}/{MANIFEST}") != manifest:
        folder.delete(local.name)  # a part of this one, or one of the same name of a course that was left
        sizes = _listed(manifest)
        for name in sizes:
            folder.put(local / name, f"{local.name}/{name}")
        there = {one.name: one.files for one in checkpoints_in(folder)}.get(local.name, {})
        if wrong := [name for name, size in sizes.items() if there.get(name) != size]:
            raise OSError(f"{wrong[0]} has {there.get(wrong[0])} bytes there, not {sizes[wrong[0]]}")
        folder.write(f"{local.name}/{MANIFEST}", manifest)
    folder.write(POINTER, f"{local.name}\n".encode())


def discard(folder: RemoteFolder, checkpoint: RemoteCheckpoint) -> None:
    """Remove a checkpoint, its manifest first, so that it is never a damaged one."""
    if checkpoint.complete:
        folder.delete(f"{checkpoint.name}/{MANIFEST}")
    folder.delete(checkpoint.name)


def metric_of(folder: RemoteFolder, checkpoint: RemoteCheckpoint) -> float | None:
    """The value of best_metric at a checkpoint."""
    try:
        value = json.loads(folder.read(f"{checkpoint.name}/{RUN_STATE}") or b"{}").get("best_metric")
    except ValueError:
        return None
    return float(value) if isinstance(value, int | float) else None


def download(url: str, into: Path, say: Callable[[str], None], *, field: str = "") -> Path:
    """Copy a checkpoint here: the one that a URL names, or of a folder the one it points at, or else the newest. One that is
    not as its manifest says is named and passed over.

    Args: into is a folder, whose content is replaced. Returns: the checkpoint's folder in it.
    Raises: RequestError when there is no valid checkpoint, it cannot be reached, or there is no room for it.
    """
    try:
        return _download(url, into, say, field)
    except RequestError:
        raise
    except Exception as error:  # each protocol's library has errors of its own
        fix = "look at the network and the credentials"
        raise RequestError(Problem(f"{url} cannot be read: {reason(error)}", fix=fix, field=field)) from error


def reason(error: Exception) -> str:
    """An error of a protocol's library in a line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _download(url: str, into: Path, say: Callable[[str], None], field: str) -> Path:
    folder = RemoteFolder(url)
    if folder.read(MANIFEST) is not None:
        parent, _, name = folder.url.rpartition("/")
        folder, names = RemoteFolder(parent), [name]
    else:
        names = _newest_first(folder)
    shutil.rmtree(into, ignore_errors=True)
    for name in names:
        local = into / name
        damage = _copy_back(folder, local, field)
        if damage is None:
            return local
        say(f"checkpoint {folder.url}/{name} is damaged ({damage}); trying the one before")
        shutil.rmtree(local, ignore_errors=True)
    what = f"every checkpoint in {url} is damaged" if names else f"there is no checkpoint in {url}"
    raise RequestError(Problem(what, fix=f"name a folder that holds {PREFIX}N, or one of those", field=field))


def _newest_first(folder: RemoteFolder) -> list[str]:
    """Names of the whole ones, from the one pointed at down. Later ones than that are of a course that was left."""
    whole = [one for one in checkpoints_in(folder) if one.complete]
    said = (folder.read(POINTER) or b"").decode(errors="replace").strip()
    last = next((one.step for one in whole if one.name == said), None)
    return [one.name for one in reversed(whole) if last is None or one.step <= last]


def _copy_back(folder: RemoteFolder, local: Path, field: str) -> str | None:
    """Copy a checkpoint here. Returns what is wrong with it, None when nothing is."""
    manifest = folder.read(f"{local.name}/{MANIFEST}") or b""
    try:
        sizes = _listed(manifest)
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"no readable {MANIFEST}"
    local.mkdir(parents=True)
    free = shutil.disk_usage(local).free
    if sum(sizes.values()) > free:
        what = f"{folder.url}/{local.name} has {sum(sizes.values()):,} bytes, and {local.parent} has {free:,} free"
        raise RequestError(Problem(what, fix="make room", field=field))
    for name in sizes:
        try:
            folder.get(f"{local.name}/{name}", local / name)
        except FileNotFoundError:
            return f"{name} is missing"
    (local / MANIFEST).write_bytes(manifest)
    return damage_of(local, required=[RUN_STATE])


def _listed(manifest: bytes) -> dict[str, int]:
    """Size by name of the files that a manifest lists. Names that lead elsewhere are no checkpoint's."""
    sizes = {str(name): int(entry["bytes"]) for name, entry in json.loads(manifest)["files"].items()}
    for name in sizes:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{name} leads out of the folder")
    return sizes
