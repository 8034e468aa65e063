"""The C++ compiler of this machine. Only speed depends on it."""

from __future__ import annotations

import shutil

COMPILERS = ("g++", "clang++", "c++")


def find_compiler() -> str | None:
    """Return the path of the first compiler found; None without one."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)
