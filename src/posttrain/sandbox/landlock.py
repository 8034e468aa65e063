"""Landlock: the kernel refuses this process all files but those that are listed, whoever it runs as (Linux 5.13 and later).

What it does not cover: names, sizes and permissions of files remain visible (stat), and permissions changed by their
owner (chmod); seccomp refuses the latter. From version 4 it refuses TCP as well, from 6 abstract unix sockets and signals.
Source: Documentation/userspace-api/landlock.rst of the kernel.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterable

from posttrain.sandbox import kernel

# The same numbers on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1  # flag of _CREATE_RULESET
_PATH_BENEATH = 1
# Rights by the version that brought the last of them: 13 in version 1, then refer, truncate, ioctl_dev.
_RIGHTS = {1: 1 << 13, 2: 1 << 14, 3: 1 << 15, 4: 1 << 15}
_ALL_RIGHTS = 1 << 16
_EXECUTE, _READ_FILE, _READ_DIR, _IOCTL_DEV = 1, 1 << 2, 1 << 3, 1 << 15
_TCP = 0b11  # bind, connect
_SCOPES = 0b11  # abstract unix sockets, signals


def version() -> int:
    """The version that the kernel offers; 0 without Landlock."""
    return max(kernel.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION)), 0)


def restrict(readable: Iterable[str], listable: Iterable[str], writable: Iterable[str]) -> None:
    """Let this process and its children read only at or below ``readable``, list names only at or below ``listable``, and write
    only at or below ``writable``; execute nothing. Paths that do not exist are skipped. Needs no_new_privs.

    Raises: OSError.
    """
    offered = version()
    if not offered:
        raise OSError(errno.ENOSYS, "this kernel has no Landlock, or it is not turned on")
    handled = _RIGHTS.get(offered, _ALL_RIGHTS) - 1
    attributes = [handled, _TCP if offered >= 4 else 0, _SCOPES if offered >= 6 else 0]
    size = 8 * (1 + (offered >= 4) + (offered >= 6))
    packed = struct.pack("3Q", *attributes)[:size]
    rules = _checked(kernel.syscall(_CREATE_RULESET, packed, ctypes.c_size_t(size), ctypes.c_uint(0)))
    try:
        for path in readable:
            _allow(rules, path, (_READ_FILE | _READ_DIR) & handled)
        for path in listable:
            _allow(rules, path, _READ_DIR)
        for path in writable:
            _allow(rules, path, handled & ~_EXECUTE & ~_IOCTL_DEV)
        _checked(kernel.syscall(_RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint(0)))
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # absent, or not this user's to see: nothing to allow
        return
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _READ_FILE
        rule = struct.pack("=Qi", rights, fd)
        _checked(kernel.syscall(_ADD_RULE, ctypes.c_int(rules), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint(0)))
    finally:
        os.close(fd)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"Landlock: {os.strerror(number)}")
    return result
