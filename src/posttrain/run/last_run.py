"""The configuration and own files that a run ran last, from its folder, or where that lost them, from owner.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from posttrain.libraries import yaml_text
from posttrain.run.config_change import flat
from posttrain.run.ownership import OWNER, owner_of

CONFIG = "config.yaml"
ABOUT = "run.json"
METRICS = "metrics.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRun:
    """The settings and files behind the steps of a run until now."""

    folder: Path  # of the run
    config: Mapping[str, Any]  # by dotted key; empty where it is not known
    text: str  # the same, as in config.yaml
    own_files: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def last_run(folder: Path, checkpoints: Path | None) -> LastRun:
    """Read what the run in ``folder`` ran last.

    Args: checkpoints, the folder of its checkpoints, if there is one.
    """
    own_files = read_about(folder).get("own_files")
    text, config = _read_config(folder / CONFIG)
    notes = []
    owner = owner_of(checkpoints) if checkpoints and not (config and own_files) else None
    if not config and owner:
        text, config = owner.config, _parsed(owner.config)
    if not _read_config(folder / CONFIG)[1]:
        then = f"compared with {OWNER}, beside the checkpoints" if config else "and changes to it cannot be noticed"
        notes.append(f"{folder / CONFIG} is gone or damaged, {then}")
    if own_files is None:
        own_files = owner.own_files if owner else {}
    return LastRun(folder=folder, config=config, text=text, own_files=own_files, notes=tuple(notes))


def run_of_origin(origin: Path) -> LastRun | None:
    """The run that a checkpoint, a folder of checkpoints or a run folder belongs to; None where nothing near it names one."""
    here = origin.resolve()
    checkpoints = next((at for at in (here, here / "checkpoints", here.parent) if owner_of(at)), None)
    folder = next((at for at in (here, *here.parents[:2]) if _is_run(at)), None)
    if folder is None and checkpoints is not None and (owner := owner_of(checkpoints)):
        folder = Path(owner.run_folder)
    return last_run(folder, checkpoints) if folder else None


def _is_run(folder: Path) -> bool:
    """Tell a run's folder from one that merely holds a config.yaml, as a user's own may."""
    return (folder / CONFIG).is_file() and any((folder / name).is_file() for name in (ABOUT, METRICS))


def read_about(folder: Path) -> dict[str, Any]:
    """run.json of a run folder; empty when there is none that can be read."""
    with suppress(OSError, ValueError):
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        return about if isinstance(about, dict) else {}
    return {}


def _read_config(path: Path) -> tuple[str, Mapping[str, Any]]:
    with suppress(OSError, ValueError):
        text = path.read_text(encoding="utf-8")
        return text, _parsed(text)
    return "", {}


@lru_cache(maxsize=2)  # a start reads the same text up to four times
def _parsed(text: str) -> Mapping[str, Any]:
    with suppress(ValueError, yaml.YAMLError):
        tree = yaml_text.safe_load(text)
        return flat(tree) if isinstance(tree, dict) else {}
    return {}
