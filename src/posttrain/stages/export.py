"""From a checkpoint to a plain Hugging Face folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from posttrain.errors import Problem, RequestError
from posttrain.stages.checkpoint import resolve_checkpoint

# What a training engine keeps beside the Hugging Face files.
ENGINE_FILES = ("optimizer.safetensors", "engine.json")


def export_checkpoint(checkpoint: Path, out: Path) -> Path:
    """Write the policy of a checkpoint (or of a run's newest valid one) as a folder that transformers loads.

    Weights are the float32 masters. Returns the checkpoint that was taken.

    Raises: RequestError when there is no valid checkpoint, or ``out`` exists and is not an empty folder.
    """
    source = resolve_checkpoint(checkpoint)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RequestError(
            Problem(f"{out} exists and is not an empty folder", fix="name a folder that does not exist yet")
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(out.name + ".tmp")
    shutil.rmtree(beside, ignore_errors=True)
    shutil.copytree(source / "policy", beside, ignore=shutil.ignore_patterns(*ENGINE_FILES))
    if out.exists():
        out.rmdir()
    os.replace(beside, out)
    return source
