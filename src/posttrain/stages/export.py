"""From a checkpoint to a plain Hugging Face folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Literal

from posttrain.errors import Problem, RequestError
from posttrain.stages.checkpoint import resolve_checkpoint

# What a training engine keeps beside the Hugging Face files.
ENGINE_FILES = ("optimizer.safetensors", "engine.json")


def export_checkpoint(checkpoint: Path, out: Path, role: Literal["policy", "critic"] = "policy") -> Path:
    """Write a model of a checkpoint (or of a run's newest valid one) as a folder that transformers loads: the policy as a
    causal language model, the critic as a token classification model with one label.

    Weights are the float32 masters. Returns the checkpoint that was taken.

    Raises: RequestError when there is no valid checkpoint, it has no such model, or ``out`` exists and is not an empty folder.
    """
    source = resolve_checkpoint(checkpoint)
    if not (source / role).is_dir():
        raise RequestError(Problem(f"{source} holds no {role}: its run had none", fix="leave --role out"))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RequestError(
            Problem(f"{out} exists and is not an empty folder", fix="name a folder that does not exist yet")
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(out.name + ".tmp")
    shutil.rmtree(beside, ignore_errors=True)
    shutil.copytree(source / role, beside, ignore=shutil.ignore_patterns(*ENGINE_FILES))
    if out.exists():
        out.rmdir()
    os.replace(beside, out)
    return source
