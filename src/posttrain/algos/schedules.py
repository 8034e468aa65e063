"""Learning rate over a run, as a factor of the peak, for update 0, 1, 2, ..."""

from __future__ import annotations

import math


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
