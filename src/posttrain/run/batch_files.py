"""RUN_DIR/batches/step_N.safetensors: the tensors of a step, exactly as they were, to look at and to learn from again.

Names begin with ``sampled.`` (records.batches.SequenceBatch, before anything was computed from it) or ``trained.``
(TrainBatch, as the update read it; its sequences under ``trained.sequences.``). What is no tensor stands in the file's
metadata: ``sampled.sample_ids``, as JSON. Fields that were None are absent. Nothing in the file is executed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from posttrain.errors import Problem, RequestError
from posttrain.records.batches import SequenceBatch, TrainBatch


def batch_path(run_folder: Path, step: int) -> Path:
    return run_folder / "batches" / f"step_{step}.safetensors"


def save_step(path: Path, sampled: SequenceBatch, trained: TrainBatch) -> None:
    """Write a step, whole or not at all."""
    tensors: dict[str, Tensor] = {}
    texts: dict[str, str] = {}
    for name, value in [*_parts("sampled", sampled), *_parts("trained", trained)]:
        if isinstance(value, Tensor):
            tensors[name] = value.detach().cpu().contiguous().clone()  # two names never share their memory in a file
        else:
            texts[name] = json.dumps(value)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    save_file(tensors, beside, metadata=texts)
    os.replace(beside, path)


def load_sampled(path: Path) -> SequenceBatch:
    """What was sampled and scored in a step.

    Raises: RequestError when the file is not there or is not one of these.
    """
    if not path.is_file():
        there = sorted(int(file.stem.removeprefix("step_")) for file in path.parent.glob("step_*.safetensors"))
        have = f"there are steps {', '.join(map(str, there[:20]))}" if there else "the run wrote none"
        fix = "steps are recorded with tracking.batches_every_steps=1"
        raise RequestError(Problem(f"there is no recorded batch {path} ({have})", fix=fix))
    values: dict[str, Any] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name, text in (file.metadata() or {}).items():
                values[name] = json.loads(text)
            for name in file.keys():  # noqa: SIM118  # no mapping: it has keys() alone
                values[name] = file.get_tensor(name)
        return _sequences(values)
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        fix = "make the step again with the version that is to read it"
        raise RequestError(Problem(f"{path} is not a recorded batch of this version: {error}", fix=fix)) from error


def _parts(prefix: str, record: SequenceBatch | TrainBatch) -> Iterator[tuple[str, Any]]:
    """Dotted name and value of everything in a batch that is there."""
    for item in fields(record):
        value = getattr(record, item.name)
        if isinstance(value, SequenceBatch):
            yield from _parts(f"{prefix}.{item.name}", value)
        elif isinstance(value, Mapping):
            yield from ((f"{prefix}.{item.name}.{name}", tensor) for name, tensor in value.items())
            yield f"{prefix}.{item.name}", list(value)  # their order; also of a mapping that is empty
        elif value is not None:
            yield f"{prefix}.{item.name}", value


def _sequences(values: Mapping[str, Any]) -> SequenceBatch:
    known: dict[str, Any] = {}
    for item in fields(SequenceBatch):
        name = f"sampled.{item.name}"
        value = values.get(name)
        if item.name == "sample_ids":
            value = tuple(values[name])
        elif isinstance(value, list):  # the names of a mapping
            value = {part: values[f"{name}.{part}"] for part in value}
        if value is not None:
            known[item.name] = value
    return SequenceBatch(**known)
