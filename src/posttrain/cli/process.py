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
    """Set what must stand in the environment before torch is imported. What the user has set stays."""
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads and forked workers do not go together
    if config.placement.device != "cuda":
        prepare_cpu(config.placement.cpu_threads, environment)


def prepare_cpu(threads: int | None = None, environment: MutableMapping[str, str] = os.environ) -> None:
    """What makes torch fast and steady on a CPU; before torch is imported.

    OpenMP gets one thread per core, or ``threads``, and they wait for each other only briefly before they sleep. By default
    they spin for milliseconds, and with another process on the same cores a spinning thread keeps the one it waits for from
    running: sampling gets erratic and 1.5 to 2 times slower than with this (docs/benchmarks.md). Binding threads to cores
    helped neither alone nor beside others. Torch asks for huge pages for tensors of 2 MiB and more, so that matrix products
    miss fewer address translations; where the system gives none, nothing changes.
    """
    keep_memory()
    environment.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    environment.setdefault("OMP_NUM_THREADS", str(threads or available_cores()))
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
