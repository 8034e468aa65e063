"""A process's descendants: finding, measuring and killing them. Linux's /proc and prctl; elsewhere there is only the group."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LINUX = sys.platform == "linux"
PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Usage:
    processes: int
    cpu_s: float  # of living processes, and of dead ones that their parents have waited for
    memory_bytes: int  # resident, what processes share counted for each of them


def adopt_orphans() -> None:
    """From now on, descendants of this process whose parent dies become its children."""
    if LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """This process is killed when its parent, which started it a moment ago, ends."""
    if LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it has ended already
        os.kill(os.getpid(), signal.SIGKILL)


def live_on() -> None:
    """The end of the parent, or of the thread of it that started this process, is no longer this one's."""
    if LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def be_killed_first() -> None:
    """Where memory runs out, the kernel takes this process and those it starts before any other."""
    with suppress(OSError):
        (PROC / "self/oom_score_adj").write_text("1000")


def has_proc() -> bool:
    """Whether /proc is there, without which no descendant can be found."""
    return (PROC / "self/stat").exists()


@functools.cache
def _kernel_lists_children() -> bool:
    """Some kernels and sandboxes leave these files out (CONFIG_PROC_CHILDREN)."""
    return (PROC / f"self/task/{os.getpid()}/children").exists()


def children(pid: int) -> list[int]:
    """Of all its threads; empty when it is gone. One that starts meanwhile may be missing."""
    if not _kernel_lists_children():
        return [each for each, parent in _parents() if parent == pid]
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(PROC / str(pid) / "task"):
            with suppress(OSError):
                found += map(int, (PROC / str(pid) / "task" / thread / "children").read_text().split())
    return found


def _parents() -> Iterator[tuple[int, int]]:
    """Every process that can be seen, and its parent."""
    with suppress(OSError):
        for name in os.listdir(PROC):
            if name.isdigit():
                with suppress(OSError, ValueError, IndexError):
                    yield int(name), int((PROC / name / "stat").read_bytes().rpartition(b")")[2].split()[1])


def descendants(pid: int, *, without: Collection[int] = ()) -> list[int]:
    """Children first, then theirs; those in ``without`` are left out, and what is below them."""
    found = [each for each in children(pid) if each not in without]
    for each in found:  # grows while it is walked
        found += [below for below in children(each) if below not in without]
    return found


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP, or a debugger, holds it; also False for one that is gone, and where there is no /proc."""
    with suppress(OSError):
        return (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[0] in b"Tt"
    return False


def usage(pids: Iterable[int]) -> Usage:
    """What these processes use together; those that are gone count nothing."""
    count, ticks, pages = 0, 0, 0
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):
            # pid (name) state ppid … utime is field 14, then stime, cutime, cstime; rss is field 24. A name may hold spaces.
            fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
            if fields[0] == b"Z":
                continue
            count += 1
            ticks += sum(map(int, fields[11:15]))
            pages += int(fields[21])
    return Usage(count, ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE"))


def shared_out_bytes(pids: Iterable[int]) -> int:
    """Resident memory of these processes together, each shared page counted once (PSS). Slower than ``usage``."""
    total = 0
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):
            lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) << 10
    return total


def address_space_bytes() -> int:
    """Of this process; 0 where /proc does not tell."""
    with suppress(OSError, ValueError):
        return int((PROC / "self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def kill_group(leader: int) -> None:
    """Kill a process group at once: unlike one process after the other, no fork can slip through."""
    if leader != os.getpgrp():
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


def kill_all_descendants(patience_s: float = 10.0) -> None:
    """Kill every descendant of this process, which has adopted their orphans, and wait until none is left.

    A process that forks while it is looked for leaves a child, which is found in the next round: rounds go on until this
    process has no child. Process groups go first, so that a fork bomb inside one ends in one stroke.
    """
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        found = children(os.getpid())
        groups: set[int] = set()
        for pid in found:  # grows while it is walked
            for group in _group_of(pid):
                if group not in groups:
                    groups.add(group)
                    kill_group(group)
            kill([pid])  # before its children are listed: from now on it can have no more of them
            found += children(pid)
        if not list(ended_children()) and not has_children():
            return
        time.sleep(0.0005)


def ended_children() -> Iterator[tuple[int, int]]:
    """The pid and wait status of every child that has ended; they are gone afterwards."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            yield pid, status


def has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    except ChildProcessError:
        return False


def kill_marked(name: str, value: str, patience_s: float = 10.0) -> None:
    """Kill every process that was started with the environment variable ``name`` = ``value``, until none is left: the way to
    find descendants whose common ancestor is gone. Linux only."""
    deadline = time.monotonic() + patience_s
    while (found := list(marked(name, value))) and time.monotonic() < deadline:
        kill(found)
        time.sleep(0.001)


def marked(name: str, value: str) -> Iterator[int]:
    """Living processes of this user whose environment, as it was when they were started, has ``name`` = ``value``."""
    wanted = f"{name}={value}".encode()
    for folder in PROC.iterdir() if LINUX and PROC.is_dir() else ():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    yield int(folder.name)


def _group_of(pid: int) -> list[int]:
    try:
        return [os.getpgid(pid)]
    except ProcessLookupError:
        return []
