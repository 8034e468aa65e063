"""The walls of a box, by name, and putting them up around this process."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from posttrain.sandbox import kernel, landlock, seccomp, view

# What each wall does, in the order in which they are put up.
WALLS = {
    "user": "it runs as a user of its own, who owns nothing",
    "mount": "it sees Python's library and a scratch folder, no other file",
    "pid": "it sees its own processes only, and all of them end with it",
    "network": "it has no network, not even this machine's own addresses",
    "ipc": "it shares no queues and no memory with other processes",
    "uts": "it sees another host name",
    "landlock": "it may open no file but Python's library",
    "seccomp": "the kernel refuses it sockets, forks, tracing, mounts and more",
}
_NAMESPACES: dict[str, int] = {
    "mount": kernel.CLONE_NEWNS,
    "network": kernel.CLONE_NEWNET,
    "ipc": kernel.CLONE_NEWIPC,
    "uts": kernel.CLONE_NEWUTS,
}
_CAP_SYS_ADMIN = 21
# Files in memory (memfd_create) count for no process; seccomp refuses them. Elsewhere each is as long as a file may be, at most.
OPEN_FILES_WITHOUT_SECCOMP = 16
# With the number of a box added, an unused user id: nothing belongs to it, and its processes can be counted.
_FIRST_USER = 2_000_000_000
# Longest wall time of a run, in timeout_s: a program that waits for a core all the time must end, too.
WALL_FACTOR = 10.0


class WallError(Exception):
    """A wall could not be put up. ``args`` are its name and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxLimits:
    """Limits of one run, which hold whatever walls there are."""

    # Time from the program's first line, less the time for which it was ready and waited for a core, so that a busy machine
    # changes no verdict; CPU time of all its threads, rounded up to the next second; and the wall time is WALL_FACTOR times that.
    timeout_s: float = 5.0
    memory_bytes: int = 1 << 30  # address space
    output_bytes: int = 16 << 20  # of stdout, stderr and the result, each
    scratch_bytes: int = 16 << 20  # all files together, and the longest one
    threads: int = 64
    open_files: int = 64

    @property
    def wall_s(self) -> float:
        """Longest wall time of a run."""
        return WALL_FACTOR * self.timeout_s

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def leave(walls: Sequence[str]) -> None:
    """Put up the walls that come before a fork: the next child has another user namespace and is the first process of its pid
    namespace.

    Raises: WallError.
    """
    if "user" in walls and not kernel.has_capability(_CAP_SYS_ADMIN):
        _put("user", _own_user_namespace)
    if "pid" in walls:
        _put("pid", partial(kernel.unshare, kernel.CLONE_NEWPID))


def shut(walls: Sequence[str], limits: BoxLimits, readable: Sequence[str], number: int) -> None:
    """Put up the walls that come after the fork; this process's privileges go last. ``number`` is this box's own.

    Raises: WallError; OSError when the limits or the privileges cannot be changed.
    """
    # Should memory run out, this process goes before any other.
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    for name, flag in _NAMESPACES.items():
        if name in walls:
            _put(name, partial(kernel.unshare, flag))
    if "uts" in walls:
        _put("uts", kernel.forget_host_name)
    visible, writable = [*view.runtime_files(), "/dev/null", *readable], []
    library = [str(view.STANDARD_LIBRARY)]  # importing lists it
    if "mount" in walls:
        visible, writable = ["/"], [view.SCRATCH]  # nothing else is there
        _put("mount", lambda: view.enter(limits.scratch_bytes, readable))
    own_user = "user" in walls and os.getuid() == 0
    if own_user:
        _put("user", lambda: _become_nobody(number, sees_own_files="mount" in walls))
    open_files = limits.open_files if "seccomp" in walls else min(limits.open_files, OPEN_FILES_WITHOUT_SECCOMP)
    _limit(limits, open_files, count_threads="user" in walls)
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which would undo it
    if "landlock" in walls:
        _put("landlock", lambda: landlock.restrict(visible, library, writable))
    if "seccomp" in walls:
        _put("seccomp", seccomp.refuse)


def _put(name: str, step: Callable[[], None]) -> None:
    try:
        step()
    except OSError as error:
        raise WallError(name, str(error)) from error


def _own_user_namespace() -> None:
    uid, gid = os.getuid(), os.getgid()
    kernel.unshare(kernel.CLONE_NEWUSER)
    for file, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{file}", "w", encoding="ascii") as opened:
            opened.write(text)


def _become_nobody(number: int, *, sees_own_files: bool) -> None:
    if not sees_own_files:
        raise OSError("without mount, another user might not be able to read Python")
    user = _FIRST_USER + number
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _limit(limits: BoxLimits, open_files: int, *, count_threads: bool) -> None:
    """The kernel counts threads by user; where the box has none of its own, the warden counts them."""
    cpu_s = int(limits.timeout_s) + 1
    for kind, value in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, limits.scratch_bytes),
        (resource.RLIMIT_NOFILE, open_files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        *([(resource.RLIMIT_NPROC, limits.threads)] if count_threads else []),
    ):
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
