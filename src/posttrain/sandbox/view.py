"""The file system of a boxed process: Python's standard library, read-only, and a small scratch folder."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from posttrain.sandbox import kernel

SCRATCH = "/scratch"
STANDARD_LIBRARY = Path(os.__file__).resolve().parent
# Folders of the standard library that hold something else, or nothing that a program needs.
_HIDDEN = ("site-packages", "dist-packages", "test", "idlelib", "ensurepip")
# Shared libraries that modules of the standard library load when they are imported.
_LIBRARIES = (
    *("libm.", "libcrypt", "libssl", "libz.", "liblzma", "libbz2", "libffi", "libsqlite3", "libmpdec", "libexpat"),
    *("libuuid", "libgcc_s", "libstdc++"),
)
# Where the new root is put together: any folder will do, since only this process sees what is mounted on it.
_PLACES = ("/tmp", "/var/tmp", "/run", "/mnt", "/usr")
# Flags of a mount that a bind mount of it must keep, as statvfs reports them and as mount takes them.
_KEPT = (
    (os.ST_NOEXEC, kernel.MS_NOEXEC),
    (os.ST_NOATIME, 1 << 10),
    (os.ST_NODIRATIME, 1 << 11),
    (os.ST_RELATIME, 1 << 21),
)


@functools.cache
def runtime_files() -> list[str]:
    """The parts of the standard library and the shared libraries that it needs."""
    parts = [str(path) for path in STANDARD_LIBRARY.iterdir() if path.name not in _HIDDEN]
    return sorted(parts) + shared_libraries()


@functools.cache
def shared_libraries() -> list[str]:
    multiarch = getattr(sys.implementation, "_multiarch", "")
    folders = [f"/usr/lib/{multiarch}", "/usr/lib64", f"{sys.base_prefix}/{sys.platlibdir}", f"{sys.base_prefix}/lib"]
    found = {
        os.path.join(folder, name)
        for folder in folders
        if os.path.isdir(folder)
        for name in os.listdir(folder)
        if name.startswith(_LIBRARIES) and ".so." in name
    }
    return sorted(found)


def enter(scratch_bytes: int, readable: Iterable[str]) -> None:
    """Make a root folder that holds the runtime, ``readable`` files under their own names, /dev/null and SCRATCH, and nothing
    else, and make it this process's root. Needs a mount namespace of its own.

    Raises: OSError.
    """
    # Nothing mounted here shows outside.
    kernel.mount(None, "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    shown = [str(STANDARD_LIBRARY), *shared_libraries(), *readable]
    # Opened now: the new root may cover the paths.
    opened = [(path, os.open(path, os.O_PATH)) for path in [*shown, "/dev/null"]]
    root = next(place for place in _PLACES if os.path.isdir(place))
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,nr_inodes=1k,mode=755")
    for path, fd in opened:
        _bind(fd, root + path, device=path == "/dev/null")
        os.close(fd)
    for name in _HIDDEN:
        if (STANDARD_LIBRARY / name).is_dir():
            flags = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
            kernel.mount("tmpfs", f"{root}{STANDARD_LIBRARY}/{name}", "tmpfs", flags, "size=4k,nr_inodes=1")
    os.mkdir(root + SCRATCH)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    kernel.mount("tmpfs", root + SCRATCH, "tmpfs", flags, f"size={scratch_bytes},nr_inodes=1k,mode=1777")
    os.chdir(root)
    kernel.pivot_root(".", ".")  # the old root now lies on top of the new one
    kernel.unmount(".")
    flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount(None, "/", flags=flags)
    os.chdir(SCRATCH)


def _bind(fd: int, target: str, *, device: bool) -> None:
    """Show an opened file or folder at ``target``, read-only."""
    source = f"/proc/self/fd/{fd}"
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "xb"):
            pass
    kernel.mount(source, target, flags=kernel.MS_BIND | kernel.MS_REC)
    there = os.statvfs(target).f_flag
    flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID
    flags |= 0 if device else kernel.MS_NODEV
    for reported, kept in _KEPT:
        flags |= kept if there & reported else 0
    kernel.mount(None, target, flags=flags)
