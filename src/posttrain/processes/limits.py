"""Limits of a call, and the reasons with which it fails when it exceeds them."""

from __future__ import annotations

import resource
from dataclasses import dataclass

# The words of CallFailure.reason.
TIMEOUT = "timeout"  # more wall or CPU time than a call may take
MEMORY = "memory"  # more memory than it may hold
CRASHED = "crashed"  # the process ended: a signal, os._exit, …
OUTPUT_LIMIT = "output_limit"  # it printed, or returned, more than it may
PROCESS_LIMIT = "process_limit"  # more processes at once than it may have
EXCEPTION = "exception"  # it raised


LONGEST_FACTOR = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one call, with everything that it starts."""

    # Wall time, less the time for which its boxes were ready and waited for a core; also the CPU time of all other processes.
    wall_s: float = 10.0
    memory_bytes: int = 2 << 30  # beyond what the loaded functions hold; of one process, and of all together
    output_bytes: int = 1 << 20  # stdout and stderr
    answer_bytes: int = 1 << 20  # what it returns, as JSON
    processes: int = 32  # at once, the worker counted
    open_files: int = 1024  # a system's usual limit; a process of a pool takes about 8 of its parent's
    file_bytes: int = 1 << 30  # length of a file that it writes
    load_s: float = 120.0  # for loading the functions, once

    @property
    def longest_s(self) -> float:
        """Wall time after which a call has failed however long its boxes waited for a core."""
        return LONGEST_FACTOR * self.wall_s


def put_limits(limits: Limits, held_bytes: int) -> None:
    """Set the limits that the kernel enforces, for this process and those it will start.

    Args: held_bytes, address space in use; 0 where it is not known, and then address space has no limit.


    CPU time is limited here, too, for processes that outlive a killed keeper; the limit is raised with every call
    (``more_cpu``).
    """
    memory = [(resource.RLIMIT_AS, held_bytes + limits.memory_bytes)] if held_bytes else []
    for kind, value in (
        *memory,
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def more_cpu(limits: Limits) -> None:
    """Raise this process's limit of CPU time by one call, and a second."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(used.ru_utime + used.ru_stime + limits.wall_s) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
