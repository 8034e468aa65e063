"""Process settings that libraries read from the environment at their first import."""

from __future__ import annotations

import ctypes
import os
from collections.abc import MutableMapping
from typing import Protocol

from posttrain.config.placement import PlacementConfig
from posttrain.libraries.cores import available_cores


class Placed(Protocol):
    """A configuration of a command that uses devices."""

    @property
    def placement(self) -> PlacementConfig: ...


def prepare(config: Placed, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set environment variables that must exist before torch is imported. Variables set by the user are kept."""
    # Its threads cannot be combined with forked workers.
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    if config.placement.device != "cuda":
        prepare_cpu(config.placement.cpu_threads, environment)


def prepare_cpu(threads: int | None = None, environment: MutableMapping[str, str] = os.environ) -> None:
    """Make torch fast and its timing steady on a CPU. Call it before torch is imported.

    OpenMP gets one thread per core, or ``threads``, which spin only briefly before they sleep. By default they spin for
    milliseconds, and with another process on the same cores a spinning thread keeps the one it waits for from running:
    sampling gets erratic and 1.5 to 2 times slower (docs/benchmarks.md). Binding threads to cores helped neither alone nor with
    other processes. Torch requests huge pages for tensors of 2 MiB and more, so that matrix products miss fewer address
    translations; a system without huge pages ignores the request.
    """
    keep_memory()
    environment.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    environment.setdefault("OMP_NUM_THREADS", str(threads or available_cores()))
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", "1000")


def keep_memory() -> None:
    """Make glibc's malloc keep freed memory instead of returning it to the system.

    By default every large activation is mapped, faulted in page by page and unmapped at every step. Other C libraries have no
    mallopt or ignore it; so does a preloaded allocator (tcmalloc).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(ctypes.c_int(-1), ctypes.c_int(-1))  # M_TRIM_THRESHOLD: never return memory
        mallopt(ctypes.c_int(-2), ctypes.c_int(64 << 20))  # M_TOP_PAD: grow by 64 MiB
        mallopt(ctypes.c_int(-4), ctypes.c_int(0))  # M_MMAP_MAX: allocate large blocks on the heap, too
