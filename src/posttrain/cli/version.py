"""``posttrain version`` and ``posttrain --version``: the line that a report of a fault must name."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

import typer

import posttrain
from posttrain.run.commit import commit_of


def version() -> None:
    """Print the version, with those of Python and torch, and the commit where the package is a checkout."""
    typer.echo(version_text())


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
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "not installed"
