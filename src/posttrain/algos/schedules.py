"""Learning rate over a run, as a factor of the peak, for update 0, 1, 2, ..."""

from __future__ import annotations

import math
from collections.abc import Callable


def warmup(update: int, warmup_updates: int) -> float | None:
    """update / warmup_updates while warming up (so the very first update has factor 0), None afterwards."""
    return update / warmup_updates if update < warmup_updates else None


def constant(update: int, *, warmup_updates: int) -> float:
    """Linear warm-up from 0, then 1."""
    factor = warmup(update, warmup_updates)
    return 1.0 if factor is None else factor


def cosine(update: int, *, warmup_updates: int, total_updates: int, min_lr_ratio: float) -> float:
    """Linear warm-up from 0, then half a cosine from 1 to min_lr_ratio at total_updates, and min_lr_ratio from there on.

    Source: arXiv:1608.03983, equation 5, one cycle. (A full-period formula would rise again after the end; this stays.)
    """
    factor = warmup(update, warmup_updates)
    if factor is not None:
        return factor
    progress = min(1.0, (update - warmup_updates) / max(1, total_updates - warmup_updates))
    return min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def linear(update: int, *, warmup_updates: int, total_updates: int, min_lr_ratio: float) -> float:
    """Linear warm-up from 0, then a straight line from 1 to min_lr_ratio at total_updates, and min_lr_ratio from there on."""
    factor = warmup(update, warmup_updates)
    if factor is not None:
        return factor
    progress = min(1.0, (update - warmup_updates) / max(1, total_updates - warmup_updates))
    return 1 - (1 - min_lr_ratio) * progress


def warmup_stable_decay(
    update: int, *, warmup_updates: int, total_updates: int, min_lr_ratio: float, stable_ratio: float = 0.9
) -> float:
    """Linear warm-up from 0, then 1 for stable_ratio of what is left (rounded down), then half a cosine to min_lr_ratio.

    min_lr_ratio is reached at total_updates and stays. Source: arXiv:2404.06395; the form of the decay is verl's.
    """
    factor = warmup(update, warmup_updates)
    if factor is not None:
        return factor
    decay_start = warmup_updates + int((total_updates - warmup_updates) * stable_ratio)
    if update < decay_start:
        return 1.0
    return cosine(
        update - decay_start, warmup_updates=0, total_updates=total_updates - decay_start, min_lr_ratio=min_lr_ratio
    )


def inverse_square_root(update: int, *, warmup_updates: int) -> float:
    """Linear warm-up from 0, then sqrt(w / update), with w = warmup_updates, but at least 1. It has no end.

    Source: arXiv:1706.03762, section 5.3, scaled to a peak of 1.
    """
    factor = warmup(update, warmup_updates)
    if factor is not None:
        return factor
    peak = max(1, warmup_updates)
    return math.sqrt(peak / max(peak, update))


SCHEDULES: dict[str, Callable[..., float]] = {
    "constant": constant,
    "cosine": cosine,
    "linear": linear,
    "warmup_stable_decay": warmup_stable_decay,
    "inverse_square_root": inverse_square_root,
}
