"""Settings that libraries read from the environment once, when they are first imported."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from posttrain.config import RunConfig


def prepare(config: RunConfig, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what must stand in the environment before torch is imported. What the user has set stays.

    On a CPU, OpenMP gets one thread per core of the run. When that is every core there is, threads are bound to cores:
    unbound, the small products of a language model were seen 10 to 100 times slower beside another process. A run that
    takes only some of the cores stays unbound, because two such runs would be bound to the same ones.
    """
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads and forked workers do not go together
    if config.placement.device == "cuda":
        return
    cores = available_cores()
    threads = config.placement.cpu_threads or cores
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    if config.placement.device == "cpu" and threads >= cores:
        environment.setdefault("OMP_PROC_BIND", "close")
        environment.setdefault("OMP_PLACES", "cores")


def available_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
