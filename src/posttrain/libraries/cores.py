"""Cores of a CPU and threads on them."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_of_a_process(configured: int | None) -> int:
    """Threads of a run in one process: as configured, or else as OMP_NUM_THREADS says, or else one per core."""
    if configured is not None:
        return configured
    wanted = (
        os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    )  # OpenMP takes a list: one number per level
    return int(wanted) if wanted.isdecimal() and int(wanted) else available_cores()
