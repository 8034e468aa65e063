"""Ownership of a folder of checkpoints: it belongs to one run, which its owner.json names.

A run never resumes from, adds to or deletes from the folder of another one. To start from another run's checkpoint, the user
names it: run.resume_path.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError, Problem
from posttrain.run.checkpoint_folders import is_used, steps_in
from posttrain.run.durable import write_durably

OWNER = "owner.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The run that saves into a folder of checkpoints, and what it ran last, in case the run folder loses that."""

    id: str
    name: str
    run_folder: str  # resolved
    config: str = ""  # config.yaml
    own_files: Mapping[str, Any] = field(default_factory=dict)  # as in the run folder's run.json


def owner_of(folder: Path) -> Owner | None:
    """The owner on record; None when there is none that can be read."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        about = json.loads((folder / OWNER).read_text(encoding="utf-8"))
        return Owner(
            id=str(about["id"]),
            name=str(about["name"]),
            run_folder=str(about["run_folder"]),
            config=str(about.get("config", "")),
            own_files=dict(about.get("own_files", {})),
        )
    return None


def owner_id(folder: Path, run_folder: Path) -> str | None:
    """The id of the run in ``run_folder`` as the folder of its checkpoints knows it; None where another run owns that."""
    owner = owner_of(folder)
    return owner.id if owner and _same(owner.run_folder, run_folder) else None


def claim(folder: Path, owner: Owner) -> None:
    """Put an owner on record. ``check_owner`` must have let it in."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "id": owner.id,
        "name": owner.name,
        "run_folder": owner.run_folder,
        "config": owner.config,
        "own_files": dict(owner.own_files),
    }
    write_durably(folder / OWNER, json.dumps(about, indent=1))


def check_owner(folder: Path, run_folder: Path, about: Mapping[str, Any], *, named_by: str) -> list[str]:
    """Check that the run in ``run_folder`` may save into ``folder``.

    Args: about is run.json of the run folder, empty where there is none; named_by, the setting that names ``folder``.
    Returns: notes for the user (a folder without an owner on record, a run folder that has lost its run.json).
    Raises: ConfigError when the folder belongs to another run, or nothing shows that it belongs to this one.
    """
    owner, here = owner_of(folder), run_folder.resolve()
    inside = folder.resolve().is_relative_to(here)
    if owner is None:
        if not steps_in(folder):
            return []
        if inside or _same(about.get("checkpoints"), folder):
            return [
                f"{folder} has no owner on record, as an earlier version wrote it; it belongs to this run from now on"
            ]
        raise _refused(
            folder, f"{folder} holds checkpoints, and neither it nor {run_folder} says of which run", named_by
        )
    if owner.id in ids_of(about):
        if inside or _same(owner.run_folder, here) or not _holds(owner.run_folder, owner.id):
            return []
        what = f"{run_folder} is a copy of the run in {owner.run_folder}, which saves into {folder}"
        raise _refused(folder, what, named_by)
    if not about and _same(owner.run_folder, here):
        return [f"{run_folder} has lost its run.json; its id is taken from {folder / OWNER}"]
    if not is_used(folder) and not _holds(owner.run_folder, owner.id):
        return []  # its run is gone and saved nothing
    what = f"the checkpoints in {folder} belong to another run, the one in {owner.run_folder}"
    raise _refused(folder, what, named_by)


def ids_of(about: Mapping[str, Any]) -> list[str]:
    """The ids that the run of a run.json has and had: it gets another one when its first step is made again."""
    return [str(one) for one in (about.get("id"), *about.get("earlier_ids", [])) if one]


def _refused(folder: Path, what: str, named_by: str) -> ConfigError:
    fix = f"name another {named_by}, and to start from what is saved there add run.resume_path={folder}"
    return ConfigError(Problem(what, fix=fix, field=named_by))


def _same(path: object, other: Path) -> bool:
    return bool(path) and Path(str(path)).resolve() == other.resolve()


def _holds(run_folder: str, run_id: str) -> bool:
    """True if a folder still holds the run of this id."""
    with suppress(OSError, ValueError, AttributeError):
        about = json.loads((Path(run_folder) / "run.json").read_text(encoding="utf-8"))
        return run_id in ids_of(about)
    return False
