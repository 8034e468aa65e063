"""A gate for forks: each new process of a worker waits until its keeper has counted it. Linux 5.5 and later, x86-64 and AArch64.

Counting at intervals loses against a fork bomb, whose processes outnumber the keeper on the processor before it has killed
them; RLIMIT_NPROC counts all processes of a user, and none of root. With seccomp's user notification the kernel stops every
descendant that forks until the keeper has answered, and needs no privilege. Threads pass. A filtered process can no longer
gain privileges (a setuid program runs as its caller).

Where the kernel or a container forbids the filter there is no gate, and the keeper's count alone enforces the limit.
Sources: seccomp(2), seccomp_unotify(2), linux/seccomp.h, linux/filter.h.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import socket
import struct
from contextlib import suppress

_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER, _FLAG_NEW_LISTENER, _FLAG_CONTINUE = 1, 8, 1
_NOTIF_RECV, _NOTIF_SEND = 0xC0502100, 0xC0182101  # ioctl numbers, with the sizes 80 and 24 of what they carry
_NOTIF_BYTES = 80
_ALLOW, _NOTIFY, _ERRNO = 0x7FFF0000, 0x7FC00000, 0x00050000
_ENOSYS = 38
_CLONE_THREAD = 0x00010000
_LOAD, _EQUAL, _ANY_BIT, _RETURN = (
    0x20,
    0x15,
    0x45,
    0x06,
)  # BPF: load a word; jump if equal; jump if a bit is set; return
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data


# Per machine: its audit number, and the system calls seccomp, clone, clone3, fork and vfork (where it has them).
_MACHINES = {
    "x86_64": (0xC000003E, 317, 56, 435, (57, 58)),
    "aarch64": (0xC00000B7, 277, 220, 435, ()),
}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def close_gate() -> int | None:
    """Make this process and its descendants wait for an answer whenever they fork.

    Returns: the file descriptor on which another process answers; None where the kernel has no such gate.
    """
    if platform.system() != "Linux" or platform.machine() not in _MACHINES:
        return None
    audit, set_filter, clone, clone3, forks = _MACHINES[platform.machine()]
    code = _filter(audit, clone, clone3, forks)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return None
    program = _Program(len(code) // 8, code)
    fd = int(libc.syscall(set_filter, _SET_MODE_FILTER, _FLAG_NEW_LISTENER, ctypes.byref(program)))
    return fd if fd >= 0 else None


def _filter(audit: int, clone: int, clone3: int, forks: tuple[int, ...]) -> bytes:
    """clone3 keeps its flags in memory, where no filter can look: it fails with ENOSYS, and C libraries use clone instead."""
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, _ALLOW),  # a program for another architecture
        (_LOAD, 0, 0, _NUMBER),
        (_EQUAL, 0, 1, clone3),
        (_RETURN, 0, 0, _ERRNO | _ENOSYS),
    ]
    for fork in forks:
        code += [(_EQUAL, 0, 1, fork), (_RETURN, 0, 0, _NOTIFY)]
    code += [
        (_EQUAL, 1, 0, clone),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _NOTIFY),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def waiting(fd: int) -> int | None:
    """Take the next process that waits to fork: the number by which it is answered; None when the process is gone."""
    notification = bytearray(_NOTIF_BYTES)
    with suppress(OSError):
        fcntl.ioctl(fd, _NOTIF_RECV, notification)
        return int(struct.unpack_from("=Q", notification)[0])
    return None


def let_pass(fd: int, number: int) -> None:
    with suppress(OSError):  # it was killed meanwhile
        fcntl.ioctl(fd, _NOTIF_SEND, bytearray(struct.pack("=QqiI", number, 0, 0, _FLAG_CONTINUE)))


def hand_over(end: socket.socket, fd: int | None) -> None:
    """Send what ``close_gate`` has returned to the process at the other end, and close both here."""
    socket.send_fds(end, [b"."], [] if fd is None else [fd])
    end.close()
    if fd is not None:
        os.close(fd)


def receive(end: socket.socket) -> int | None:
    """Receive the file descriptor that ``hand_over`` has sent."""
    _, fds, _, _ = socket.recv_fds(end, 1, 1)
    end.close()
    return fds[0] if fds else None
