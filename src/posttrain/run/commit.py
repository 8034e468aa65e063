"""The commit of a folder."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

GIT_S = 5.0  # for an answer of git


def commit_of(folder: Path) -> dict[str, Any]:
    """The commit that a folder is at, and whether files that git knows differ from it; empty outside of a repository."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None or commit.returncode != 0:
        return {}
    changed = _git(folder, "diff-index", "--quiet", "HEAD")
    return {
        "commit": commit.stdout.strip(),
        "uncommitted_changes": None if changed is None or changed.returncode > 1 else changed.returncode == 1,
    }


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str] | None:
    # A repository may name a program that watches files: it is not started
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), "--no-optional-locks", *arguments]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=GIT_S, stdin=subprocess.DEVNULL)
    return None
