"""Settings that libraries read from the environment once, when they are first imported."""

from __future__ import annotations

import ctypes
import os
from collections.abc import MutableMapping
from typing import Protocol

from posttrain.config.placement import PlacementConfig


class Placed(Protocol):
    """A configuration of something that runs on devices."""

    @property
    def placement(self) -> PlacementConfig: ...


def prepare(config: Placed, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what must stand in the environment before torch is imported. What the user has set stays.

    On a CPU, OpenMP gets one thread per core of the run, and its threads wait for each other only briefly before they sleep.
    By default they spin for milliseconds, and with another process on the same cores a spinning thread keeps the one it waits
    for from running: sampling gets erratic and 1.5 to 2 times slower than with this (docs/benchmarks.md). Binding threads to
    cores helped neither alone nor beside others.
    """
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads and forked workers do not go together
    if config.placement.device == "cuda":
        return
    keep_memory()
    environment.setdefault("OMP_NUM_THREADS", str(config.placement.cpu_threads or available_cores()))
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", "1000")


def keep_memory() -> None:
    """Tell glibc's malloc to keep freed memory instead of handing it back to the system.

    By default every large activation is mapped, faulted in page by page and unmapped again at every step. Other C libraries
    have no mallopt or ignore it; an allocator that is preloaded (tcmalloc) takes its own way.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(ctypes.c_int(-1), ctypes.c_int(-1))  # M_TRIM_THRESHOLD: never give back
        mallopt(ctypes.c_int(-2), ctypes.c_int(64 << 20))  # M_TOP_PAD: grow by 64 MiB
        mallopt(ctypes.c_int(-4), ctypes.c_int(0))  # M_MMAP_MAX: large blocks come from the heap, too


def available_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
