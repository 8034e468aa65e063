"""Ending processes with all their descendants, by Linux's prctl and /proc; on other systems there is only the process group."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

from posttrain.processes import proc

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent dies, from now on."""
    if proc.LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent, which started it a moment ago, ends."""
    if proc.LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # it has ended already
        os.kill(os.getpid(), number)


def outlive_parent() -> None:
    """Undo ``die_with_parent``, which also acts when only the thread that started this process ends."""
    if proc.LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def be_killed_first() -> None:
    """Have the kernel kill this process and those it starts before any other when memory runs out."""
    with suppress(OSError):
        (proc.PROC / "self/oom_score_adj").write_text("1000")


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
        found = proc.children(os.getpid())
        groups: set[int] = set()
        for pid in found:  # grows while it is walked
            for group in _group_of(pid):
                if group not in groups:
                    groups.add(group)
                    kill_group(group)
            kill([pid])  # before its children are listed: from now on it can have no more of them
            found += proc.children(pid)
        if not list(ended_children()) and not has_children():
            return
        time.sleep(0.0005)


def kill_marked(name: str, value: str, patience_s: float = 10.0) -> None:
    """Kill every process that was started with the environment variable ``name`` = ``value``, until none is left: the way to
    find descendants whose common ancestor is gone. Linux only."""
    deadline = time.monotonic() + patience_s
    while (found := list(proc.marked(name, value))) and time.monotonic() < deadline:
        kill(found)
        time.sleep(0.001)


def ended_children() -> Iterator[tuple[int, int]]:
    """Reap every child that has ended; yields its pid and wait status."""
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


def _group_of(pid: int) -> list[int]:
    try:
        return [os.getpgid(pid)]
    except ProcessLookupError:
        return []
