"""Errors of the operating system that a disk or a path causes: their kinds, and the file that they are about."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# A path that cannot be written or read.
NO_PLACE = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.ELOOP,
}
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# A disk that fails or has gone, a mount that is not answered, and a process that has opened all files that it may.
BROKEN = {
    errno.EIO,
    errno.ENXIO,
    errno.ENODEV,
    errno.ESTALE,
    errno.EREMOTEIO,
    errno.ENOTCONN,
    errno.EMFILE,
    errno.ENFILE,
}


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name ``path`` in errors of the operating system: those of writing and syncing name no file, others a temporary one."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def is_of_a_disk(error: OSError) -> bool:
    """True for an error that the user can do something about: make room, or look after a disk or a path."""
    # Of a connection when it names no file, of a mount whose program has died when it does
    named = error.filename is not None or error.errno != errno.ENOTCONN
    return named and error.errno in NO_PLACE | NO_ROOM | BROKEN


def disk_error(error: BaseException) -> OSError | None:
    """The error of a disk or a path behind any exception; None when there is none.

    shutil collects those of a folder without a number, and libraries written in Rust, such as safetensors and tokenizers, raise
    exceptions of their own that end in ``(os error 28)``.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error if is_of_a_disk(error) else None
    number = re.search(r"\(os error (\d+)\)|\[Errno (\d+)\]", str(error))
    if number is None:
        return None
    code = int(number[1] or number[2])
    found = OSError(code, os.strerror(code))
    if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list):
        found.filename = error.args[0][0][1]
    return found if is_of_a_disk(found) else None


def described(error: OSError) -> str:
    """The file and the reason: ``runs/a/metrics.jsonl: No space left on device``."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
