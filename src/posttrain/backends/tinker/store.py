"""Saved adapters on the disk, by the paths that clients know: tinker://RUN/weights/NAME and tinker://RUN/sampler_weights/NAME.

FOLDER/RUN/weights/NAME holds a peft folder (adapter_model.safetensors, adapter_config.json), the tokenizer, the optimizer's
averages and checkpoint.json; FOLDER/RUN/sampler_weights/NAME the same without the optimizer. A folder is written
beside and renamed: it is whole or absent, whatever instant the server dies at.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from posttrain.backends.tinker.adapters import AdapterShape
from posttrain.data.chat_api import Refused
from posttrain.run.durable import sync

# As in paths, and as clients call them.
KINDS = {"weights": "training", "sampler_weights": "sampler"}
_ABOUT = "checkpoint.json"
_OLD = ".old.tmp"  # ending of a folder while another takes its place
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedAbout:
    """Facts about a saved adapter, written beside it."""

    base_model: str
    shape: AdapterShape
    created: float  # seconds since 1970
    expires: float | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A saved adapter."""

    run: str
    kind: str  # weights or sampler_weights
    name: str
    folder: Path
    about: SavedAbout

    @property
    def path(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"

    def told(self) -> dict[str, Any]:
        """Return the form that clients read."""
        files = [each for each in self.folder.iterdir() if each.is_file()]
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": KINDS[self.kind],
            "time": _iso(self.about.created),
            "tinker_path": self.path,
            "size_bytes": sum(each.stat().st_size for each in files),
            "public": False,
            "user_metadata": dict(self.about.user_metadata),
            "expires_at": None if self.about.expires is None else _iso(self.about.expires),
        }


class Store:
    """The folder of a server. Raises: OSError when it cannot be made."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.clean()

    def clean(self) -> None:
        """Remove what has expired, and what a server that died was writing; what it was replacing is there again."""
        for old in self.folder.glob(f"*/*/.*{_OLD}"):
            before = old.with_name(old.name[1:].removesuffix(_OLD))
            if not before.exists():  # it was being replaced
                old.rename(before)
        for half in self.folder.glob("*/*/.*.tmp"):
            shutil.rmtree(half, ignore_errors=True)
        for saved in self.all():
            if saved.about.expires is not None and saved.about.expires < time.time():
                shutil.rmtree(saved.folder, ignore_errors=True)

    def write(
        self,
        run: str,
        kind: str,
        name: str,
        about: SavedAbout,
        write: Callable[[Path], None],
        *,
        overwrite: bool = False,
    ) -> str:
        """Save with ``write(folder)``. Returns: its path. Raises: Refused for a name that is taken; OSError."""
        folder = self._folder(run, kind, name)
        if folder.exists() and not overwrite:
            raise Refused(f"there is a {kind}/{name} of this run already; use another name, or overwrite=True")
        beside = folder.with_name(f".{name}.tmp")
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        try:
            write(beside)
            (beside / _ABOUT).write_text(json.dumps(asdict(about)), encoding="utf-8")
            for file in beside.iterdir():
                sync(file)
            if folder.exists():
                old = folder.with_name(f".{name}{_OLD}")
                folder.rename(old)
                beside.rename(folder)
                shutil.rmtree(old)
            else:
                beside.rename(folder)
            sync(folder.parent)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        return f"tinker://{run}/{kind}/{name}"

    def find(self, path: str) -> Saved:
        """Return the saved adapter at a path. Raises: Refused when there is none."""
        parts = path.removeprefix("tinker://").split("/")
        if not path.startswith("tinker://") or len(parts) != 3 or parts[1] not in KINDS:
            kinds = " or ".join(KINDS)
            raise Refused(f"{path!r} is no path of a saved adapter: tinker://RUN/KIND/NAME, where KIND is {kinds}")
        run, kind, name = parts
        folder = self._folder(run, kind, name)
        about = _read(folder)
        if about is None:
            raise Refused(f"there is no {path} in {self.folder}", 404)
        if about.expires is not None and about.expires < time.time():
            raise Refused(f"{path} has expired", 404)
        return Saved(run=run, kind=kind, name=name, folder=folder, about=about)

    def delete(self, path: str) -> None:
        """Remove a saved adapter. Raises: Refused when there is none."""
        shutil.rmtree(self.find(path).folder)

    def all(self, run: str = "*") -> list[Saved]:
        """Return all saved adapters, of one run or of all, oldest first."""
        if run != "*" and not _NAME.fullmatch(run):
            return []
        found = []
        for folder in self.folder.glob(f"{run}/*/*"):
            about = None if folder.name.startswith(".") or folder.parent.name not in KINDS else _read(folder)
            if about is not None:
                kind, own = folder.parent.name, folder.parent.parent.name
                found.append(Saved(run=own, kind=kind, name=folder.name, folder=folder, about=about))
        return sorted(found, key=lambda saved: (saved.about.created, saved.path))

    def _folder(self, run: str, kind: str, name: str) -> Path:
        for each in (run, name):
            if not _NAME.fullmatch(each):
                raise Refused(f"{each!r} is no name: letters, digits, and . _ : - after the first, at most 200")
        return self.folder / run / kind / name


def _read(folder: Path) -> SavedAbout | None:
    try:
        found = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
        return SavedAbout(**{**found, "shape": AdapterShape(**found["shape"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
