"""The C++ compiler of this machine, which some speed depends on and nothing else."""

from __future__ import annotations

import shutil

COMPILERS = ("g++", "clang++", "c++")


def find_compiler() -> str | None:
    """The path of the first one; None where there is none."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)
