"""The line of ``posttrain --version``: what a report of a fault must name."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import posttrain
from posttrain.run.origins import commit_of


def version_text() -> str:
    """Write the versions of the package, of Python and of torch, which is not imported; and the commit of a checkout."""
    parts = [f"Python {platform.python_version()}", f"torch {_torch()}"]
    source = Path(posttrain.__file__).resolve().parents[2]
    if (source / ".git").exists() and (found := commit_of(source)):
        changed = " with changes" if found["uncommitted_changes"] else ""
        parts.append(f"commit {found['commit'][:12]}{changed}")
    return f"posttrain {posttrain.__version__} ({', '.join(parts)})"


def _torch() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "not installed"
