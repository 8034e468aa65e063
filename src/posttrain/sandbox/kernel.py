"""System calls that Python 3.11 has no functions for, through ctypes: namespaces, mounts, privileges."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterator
from contextlib import contextmanager

MACHINE = platform.machine()

# unshare(2)
CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
# mount(2)
MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
# prctl(2)
PR_SET_PDEATHSIG = 1
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2

_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Raises OSError, as everything here does."""
    _check(_libc.unshare(flags), "unshare")


def mount(source: str | None, target: str, kind: str | None = None, flags: int = 0, options: str | None = None) -> None:
    arguments = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    data = None if options is None else options.encode()
    _check(_libc.mount(*arguments, ctypes.c_ulong(flags), data), f"mount {target}")


def unmount(target: str, flags: int = MNT_DETACH) -> None:
    _check(_libc.umount2(os.fsencode(target), flags), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    _check(syscall(_PIVOT_ROOT[MACHINE], os.fsencode(new), os.fsencode(old)), "pivot_root")


def forget_host_name() -> None:
    """Call this machine "box"; in a uts namespace of one's own."""
    _check(_libc.sethostname(b"box", 3), "sethostname")


def prctl(option: int, value: int, address: object = 0) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), address, 0, 0), f"prctl {option}")


def syscall(number: int, *arguments: object) -> int:
    """The result, -1 with ``ctypes.get_errno()`` set when it failed."""
    return int(_libc.syscall(ctypes.c_long(number), *arguments))


@contextmanager
def message_queue() -> Iterator[int]:
    """A queue of System V that every user may read, by its number; -1 where the kernel has none."""
    queue = int(_libc.msgget(0, 0o1666))  # IPC_PRIVATE, IPC_CREAT
    try:
        yield queue
    finally:
        if queue >= 0:
            _libc.msgctl(queue, 0, None)  # IPC_RMID


def drop_capabilities() -> None:
    """Give up every privilege of root permanently, also those that a setuid program could bring back."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # beyond the last one that the kernel knows, or not privileged to begin with
            break
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    _check(syscall(_CAPSET[MACHINE], header, struct.pack("6I", 0, 0, 0, 0, 0, 0)), "capset")


def has_capability(number: int) -> bool:
    """Return True when this process holds a capability (21 is CAP_SYS_ADMIN, 7 CAP_SETUID)."""
    return any(int(value, 16) >> number & 1 for key, value in _status("self") if key == "CapEff")


def _status(pid: str) -> Iterator[tuple[str, str]]:
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        for line in file:
            key, _, value = line.partition(":")
            yield key, value.strip()


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
