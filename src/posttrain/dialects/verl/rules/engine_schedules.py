"""Learning rates of verl's engines veomni and torchtitan, which have schedules of their own."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.verl.rules.look import get
from posttrain.dialects.verl.strategies import TORCHTITAN, VEOMNI

# Keys of an optim section that one engine reads.
OWN = {VEOMNI: ("lr_min", "lr_start", "lr_decay_ratio"), TORCHTITAN: ("eps", "decay_type", "min_lr_factor")}
_STEPS_OF_TORCHTITAN = 10_000  # its training.steps, which verl leaves as it is
_SHAPES = {"linear": "linear", "cosine": "cosine", "sqrt": "warmup_stable_decay"}


def ignore_others(keys: Reader, optim: str, strategy: str) -> None:
    """Report what only another engine reads."""
    for engine, names in OWN.items():
        for name in names:
            if engine != strategy:
                keys.ignore(f"{optim}.{name}", f"read by the strategy {engine} only")


def schedule_of(keys: Reader, optim: str, ours: str, *, strategy: str, updates: int) -> dict[str, Any]:
    """Return the schedule's fields.

    Args: ``optim`` is the section of the keys; ``ours`` that of the fields; ``updates`` those of an iteration.
    """
    ignore_others(keys, optim, strategy)
    for name in ("min_lr_ratio", "num_cycles", "zero_indexed_step"):
        keys.ignore(f"{optim}.{name}", f"{strategy} does not read it")
    make = _veomni if strategy == VEOMNI else _torchtitan
    return make(keys, optim, ours, updates)


def _veomni(keys: Reader, optim: str, ours: str, updates: int) -> dict[str, Any]:
    """Warm-up from lr_start, then constant or a cosine to lr_min. Source: VeOmni, optim/lr_scheduler.py."""
    style = f"{optim}.lr_scheduler_type"
    # A cosine is the default of its file
    name = get(keys, style, "cosine") if keys.written(style) else "cosine"
    if name not in ("cosine", "constant"):
        keys.problem(f"veomni's learning rate is cosine or constant, not {name}", key=style, fix=f"use {style}=cosine")
        name = "cosine"
    keys.ignore(f"{optim}.lr_warmup_steps", "veomni reads lr_warmup_steps_ratio")
    warmup, lr = get(keys, f"{optim}.lr_warmup_steps_ratio", 0.0), keys[f"{optim}.lr"]
    fields: dict[str, Any] = {f"{ours}.name": name, f"{ours}.warmup_ratio": warmup}
    if lr <= 0:
        return fields
    if warmup and (start := get(keys, f"{optim}.lr_start", 0.0)):
        fields[f"{ours}.warmup_start_ratio"] = start / lr
    elif not warmup:
        keys.ignore(f"{optim}.lr_start", "there is no warm-up")
    if name == "constant":
        for other in ("lr_min", "lr_decay_ratio"):
            keys.ignore(f"{optim}.{other}", "the learning rate is constant after warm-up")
        return fields
    fields[f"{ours}.min_lr_ratio"] = get(keys, f"{optim}.lr_min", 0.0) / lr
    share, total = get(keys, f"{optim}.lr_decay_ratio", 1.0), get(keys, "trainer.total_training_steps")
    if share < 1 and total is None:
        what = f"a decay over {share:g} of the run is known only where trainer.total_training_steps is given"
        keys.problem(what, key=f"{optim}.lr_decay_ratio", fix="give trainer.total_training_steps")
    elif share < 1:
        fields[f"{ours}.decay_updates"] = max(1, int(total * share)) * updates
    return fields


def _torchtitan(keys: Reader, optim: str, ours: str, updates: int) -> dict[str, Any]:
    """Warm-up, then a fall that ends in iteration 10000. Source: torchtitan, components/optimizer/lr_scheduler.py."""
    steps, floor = get(keys, f"{optim}.lr_warmup_steps", -1), get(keys, f"{optim}.min_lr_factor", 0.0)
    fields: dict[str, Any] = {f"{ours}.warmup_ratio": get(keys, f"{optim}.lr_warmup_steps_ratio", 0.0)}
    if steps > 0:
        fields |= {f"{ours}.warmup_updates": steps * updates, f"{ours}.warmup_ratio": 0.0}
    if steps > 0 or fields[f"{ours}.warmup_ratio"]:
        fields[f"{ours}.counts_from"] = 1  # its first rate is above 0
    if floor == 1:
        keys.ignore(f"{optim}.decay_type", "min_lr_factor is 1: the learning rate does not fall")
        return fields | {f"{ours}.name": "constant"}
    shape = get(keys, f"{optim}.decay_type", "linear")
    fields |= {
        f"{ours}.name": _SHAPES[shape],
        f"{ours}.min_lr_ratio": floor,
        f"{ours}.decay_updates": _STEPS_OF_TORCHTITAN * updates,
    }
    if shape == "sqrt":
        fields |= {f"{ours}.decay": "minus_sqrt", f"{ours}.stable_ratio": 0.0}
    keys.warn(
        f"{optim}: with torchtitan, verl's learning rate reaches its floor in iteration {_STEPS_OF_TORCHTITAN}, whatever the "
        f"length of the run; {optim}.min_lr_factor=1.0 keeps it constant"
    )
    return fields
