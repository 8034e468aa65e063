"""What a process that drives a run under Ray holds: memory, files, threads, and promises of Ray's object store."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path
from typing import NamedTuple


class Held(NamedTuple):
    """At one moment."""

    cpu_s: float  # used so far
    mib: float
    files: int
    threads: int
    promises: int  # values of the object store, in memory or still to come, that this process refers to
    objects: int  # in the store of this machine
    shared_mib: float  # in use there

    TITLES = (
        "CPU of the driver, s",
        "memory of the driver, MiB",
        "its open files",
        "its threads",
        "its references to the object store",
        "objects in the store",
        "their memory, MiB",
    )

    @classmethod
    def now(cls) -> Held:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        mib = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        return cls(time.process_time(), mib, len(os.listdir("/proc/self/fd")), threading.active_count(), *_in_store())


def _in_store() -> tuple[int, int, float]:
    """References of this process, objects and MiB in use; none where Ray does not run."""
    import ray
    from ray._private.internal_api import memory_summary
    from ray._private.worker import global_worker

    if not ray.is_initialized():
        return 0, 0, 0.0
    references = len(global_worker.core_worker.get_all_reference_counts())
    here = ray.get_runtime_context().gcs_address  # there may be other clusters on the machine
    said = memory_summary(here, stats_only=True)
    found = re.search(r"Plasma memory usage (\d+) MiB, (\d+) objects", said)
    return references, int(found[2]) if found else 0, float(found[1]) if found else 0.0
