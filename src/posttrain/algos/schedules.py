"""Learning rate and weight decay over a run, as factors for update 0, 1, 2, ..."""

from __future__ import annotations

import math
from collections.abc import Callable


def warmup(update: int, warmup_updates: int, start: float = 0.0) -> float | None:
    """A straight line from ``start`` at update 0 to 1 at ``warmup_updates`` (so a warm-up from 0 moves nothing in the very
    first update); None from there on."""
    return start + (1 - start) * update / warmup_updates if update < warmup_updates else None


def constant(update: int, *, warmup_updates: int, warmup_start_ratio: float = 0.0) -> float:
    """Warm-up, then 1."""
    factor = warmup(update, warmup_updates, warmup_start_ratio)
    return 1.0 if factor is None else factor


def cosine(
    update: int,
    *,
    warmup_updates: int,
    total_updates: int,
    min_lr_ratio: float,
    cycles: float = 0.5,
    warmup_start_ratio: float = 0.0,
) -> float:
    """Warm-up, then ``cycles`` waves between 1 and min_lr_ratio; from total_updates on it stays where it is.

    Source: arXiv:1608.03983, equation 5, which is half a wave (cycles = 0.5). A formula that went on would rise again after
    the end; this stays.
    """
    factor = warmup(update, warmup_updates, warmup_start_ratio)
    if factor is not None:
        return factor
    wave = math.cos(2 * math.pi * cycles * progress(update, warmup_updates, total_updates))
    return min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + wave)


def linear(
    update: int, *, warmup_updates: int, total_updates: int, min_lr_ratio: float, warmup_start_ratio: float = 0.0
) -> float:
    """Warm-up, then a straight line from 1 to min_lr_ratio at total_updates, and min_lr_ratio from there on."""
    factor = warmup(update, warmup_updates, warmup_start_ratio)
    if factor is not None:
        return factor
    return 1 - (1 - min_lr_ratio) * progress(update, warmup_updates, total_updates)


# Share of the peak above the floor that is left after a share y of the decay; 1 at 0, and 0 at 1 but for constant.
DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": lambda y: 0.5 * (1 + math.cos(math.pi * y)),
    "linear": lambda y: 1 - y,
    "exponential": lambda y: 2 * 0.5**y - 1,
    "minus_sqrt": lambda y: 1 - math.sqrt(y),
    "constant": lambda y: 1.0,
}


def warmup_stable_decay(
    update: int,
    *,
    warmup_updates: int,
    total_updates: int,
    min_lr_ratio: float,
    stable_ratio: float = 0.9,
    decay: str = "cosine",
    warmup_start_ratio: float = 0.0,
) -> float:
    """Warm-up, then 1 for stable_ratio of what is left (rounded down), then a decay to min_lr_ratio.

    min_lr_ratio is reached at total_updates and stays; a constant decay does not fall at all. Source: arXiv:2404.06395; the
    shapes are Megatron's, verl's is the cosine.
    """
    factor = warmup(update, warmup_updates, warmup_start_ratio)
    if factor is not None:
        return factor
    if decay == "constant":
        return 1.0
    if update >= total_updates:  # also where stable_ratio 1 leaves no update for the decay
        return min_lr_ratio
    # (1 - 4 / 5) x 5 is 0.9999999999999998: a ratio that was made from updates has to give them back.
    decay_start = warmup_updates + math.floor((total_updates - warmup_updates) * stable_ratio + 1e-9)
    if update < decay_start:
        return 1.0
    return min_lr_ratio + (1 - min_lr_ratio) * DECAYS[decay](progress(update, decay_start, total_updates))


def inverse_square_root(
    update: int,
    *,
    warmup_updates: int,
    total_updates: int,
    min_lr_ratio: float = 0.0,
    warmup_start_ratio: float = 0.0,
    timescale_updates: int | None = None,
) -> float:
    """Warm-up, then sqrt(w / update), with w = warmup_updates but at least 1, and never below min_lr_ratio; after
    total_updates it is min_lr_ratio where that is above 0. With timescale_updates s: sqrt(s / (s + updates after the warm-up)).

    Source: arXiv:1706.03762, section 5.3, scaled to a peak of 1; floor and end as Megatron has them, the timescale as
    transformers, whose get_inverse_sqrt_schedule has s = 10,000 without a warm-up, and the warm-up's updates with one.
    """
    factor = warmup(update, warmup_updates, warmup_start_ratio)
    if factor is not None:
        return factor
    if min_lr_ratio and update > total_updates:
        return min_lr_ratio
    if timescale_updates is not None:
        return max(min_lr_ratio, math.sqrt(timescale_updates / (timescale_updates + update - warmup_updates)))
    peak = max(1, warmup_updates)
    return max(min_lr_ratio, math.sqrt(peak / max(peak, update)))


def progress(update: int, start: int, end: int) -> float:
    """Return the fraction of the way from ``start`` to ``end`` that is done, at most 1."""
    return min(1.0, (update - start) / max(1, end - start))


def weight_decay(update: int, *, total_updates: int, start: float, end: float, shape: str = "linear") -> float:
    """The weight decay of an update: from ``start`` at update 0 to ``end`` at total_updates, and ``end`` from there on.

    Args: shape is linear or cosine (slow at both ends). Source: Megatron's weight_decay_incr_style.
    """
    done = progress(update, 0, total_updates)
    share = done if shape == "linear" else 0.5 * (1 - math.cos(math.pi * done))
    return start + (end - start) * share


SCHEDULES: dict[str, Callable[..., float]] = {
    "constant": constant,
    "cosine": cosine,
    "linear": linear,
    "warmup_stable_decay": warmup_stable_decay,
    "inverse_square_root": inverse_square_root,
}
