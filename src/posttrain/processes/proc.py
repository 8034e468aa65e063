"""Reading /proc: how a process is, the processes below it, and their use of memory and CPU time. Standard library only.

Linux. Elsewhere, and where /proc is not mounted, no process has a state or children.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LINUX = sys.platform == "linux"
PROC = Path("/proc")
# Indices into the fields of /proc/PID/stat behind the name (proc(5) counts from 1, with pid and name before them).
_STATE, _PARENT, _SESSION, _CPU, _THREADS, _STARTED, _RESIDENT = 0, 1, 3, slice(11, 15), 17, 19, 21


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources that some processes use together."""

    processes: int
    cpu_s: float  # of living processes, and of dead ones that their parents have waited for
    memory_bytes: int  # resident; pages that processes share count for each of them


def is_mounted() -> bool:
    """/proc is there; without it no descendant can be found."""
    return (PROC / "self/stat").exists()


def started(pid: int) -> int | None:
    """Start of a process, in clock ticks after the machine's; None when it is gone, or a zombie."""
    fields = _stat(pid)
    return None if fields is None or fields[_STATE] in b"ZX" else int(fields[_STARTED])


def state(pid: int, started: int | None = None) -> str:
    """``running``, ``stopped`` (by SIGSTOP, or a debugger) or ``gone``, which a zombie is too.

    Args: started, as ``started`` gave it, tells the process apart from a later one with the same number.
    """
    fields = _stat(pid)
    if fields is None or fields[_STATE] in b"ZX" or started not in (None, int(fields[_STARTED])):
        return "gone"
    return "stopped" if fields[_STATE] in b"Tt" else "running"


def is_stopped(pid: int) -> bool:
    return state(pid) == "stopped"


def children(pid: int) -> list[int]:
    """Children of all its threads; empty when it is gone. One that starts meanwhile may be missing."""
    if not _kernel_lists_children():
        return [each for each, parent in _parents() if parent == pid]
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(PROC / str(pid) / "task"):
            with suppress(OSError):
                found += map(int, (PROC / str(pid) / "task" / thread / "children").read_text().split())
    return found


def descendants(pid: int, *, without: Collection[int] = ()) -> list[int]:
    """Children first, then theirs; those in ``without`` are left out, and the processes below them."""
    found = [each for each in children(pid) if each not in without]
    for each in found:  # grows while it is walked
        found += [below for below in children(each) if below not in without]
    return found


def of_session(session: int) -> list[int]:
    """Living processes of a session."""
    found = []
    for pid in all_processes():
        fields = _stat(pid)
        if fields is not None and fields[_STATE] not in b"ZX" and int(fields[_SESSION]) == session:
            found.append(pid)
    return found


def marked(name: str, value: str) -> Iterator[int]:
    """Living processes of this user that were started with the environment variable ``name`` = ``value``."""
    wanted = f"{name}={value}".encode()
    for pid in all_processes():
        if pid != os.getpid():
            with suppress(OSError):
                if wanted in (PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                    yield pid


def usage(pids: Iterable[int]) -> Usage:
    """Resources that these processes use together; those that are gone count nothing."""
    count, ticks, pages = 0, 0, 0
    for pid in pids:
        fields = _stat(pid)
        if fields is not None and fields[_STATE] != b"Z":
            count += 1
            ticks += sum(map(int, fields[_CPU]))
            pages += int(fields[_RESIDENT])
    return Usage(count, ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE"))


def proportional_bytes(pids: Iterable[int]) -> int:
    """Resident memory of these processes together, each page shared out among those that have it (PSS). Slower than ``usage``."""
    total = 0
    for pid in pids:
        with suppress(OSError, ValueError, IndexError, StopIteration):
            lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) << 10
    return total


def threads_of(pid: int) -> int:
    """Threads of a process; 0 when it is gone."""
    fields = _stat(pid)
    return 0 if fields is None else int(fields[_THREADS])


def core_wait_s(pid: int | str = "self") -> float:
    """Seconds for which a process was ready to run and waited for a core, of its thread that waited longest; 0 where the kernel
    does not say. It is 0 while a process sleeps or runs."""
    longest = 0
    with suppress(OSError):
        for thread in os.listdir(PROC / str(pid) / "task"):
            with suppress(OSError, ValueError, IndexError):
                longest = max(longest, int((PROC / str(pid) / "task" / thread / "schedstat").read_text().split()[1]))
    return longest / 1e9


def address_space_bytes() -> int:
    """Address space of this process; 0 where /proc does not say."""
    with suppress(OSError, ValueError):
        return int((PROC / "self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def data_bytes() -> int:
    """Memory of this process that RLIMIT_DATA counts: private and writable, but for the stack."""
    with suppress(OSError, ValueError, StopIteration):
        lines = (PROC / "self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmData:")) << 10
    return 0


def thread_count() -> int:
    """Threads of this process, also those that Python does not know."""
    with suppress(OSError):
        return len(os.listdir(PROC / "self/task"))
    return threading.active_count()


def mapped_files(pids: Iterable[int], prefix: str) -> set[str]:
    """Files whose names begin with ``prefix`` and that any of these processes has mapped into its memory."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            for line in (PROC / str(pid) / "maps").read_text().splitlines():
                if (name := line.split()[-1]).startswith(prefix):
                    found.add(name)
    return found


@functools.cache
def _kernel_lists_children() -> bool:
    """Some kernels and sandboxes leave these files out (CONFIG_PROC_CHILDREN)."""
    return (PROC / f"self/task/{os.getpid()}/children").exists()


def all_processes() -> list[int]:
    with suppress(OSError):
        return [int(name) for name in os.listdir(PROC) if name.isdigit()]
    return []


def _parents() -> Iterator[tuple[int, int]]:
    """Every process that can be seen, and its parent."""
    for pid in all_processes():
        if (fields := _stat(pid)) is not None:
            yield pid, int(fields[_PARENT])


def _stat(pid: int) -> list[bytes] | None:
    """The fields behind the name, which may hold spaces; None when there is no such process."""
    with suppress(OSError):
        fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        return fields if len(fields) > _RESIDENT else None
    return None
