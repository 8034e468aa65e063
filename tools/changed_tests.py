"""Print the tests of what has changed: `python tools/changed_tests.py [BASE]`, part of `make check`.

Changed is what differs between the working tree and the commit where this branch left BASE (default: origin/main, or main), and
files that git does not know yet. A changed file of src/posttrain leads to the folder of tests/unit that mirrors its own, or to
the nearest one above it that exists; a file at the top, and one of tools, to tests/unit/test_NAME.py; a changed test to itself,
and a changed conftest.py to its folder.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE, UNITS = Path("src/posttrain"), Path("tests/unit")


def git(*arguments: str) -> list[str]:
    """Lines of a git command's output; none when it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


def changed_files(base: str | None) -> list[str]:
    """Paths relative to the repository, as git prints them."""
    branches = [base] if base else ["origin/main", "main"]
    fork = next((found[0] for branch in branches if (found := git("merge-base", "HEAD", branch))), "HEAD")
    return git("diff", "--name-only", fork) + git("ls-files", "--others", "--exclude-standard")


def tests_of(path: str) -> str | None:
    """The tests to run for one changed file, or None when it has none of its own."""
    file = Path(path)
    if file.parts[:1] == ("tests",):
        target = file.parent if file.name == "conftest.py" else file if file.name.startswith("test_") else None
    elif file.is_relative_to(SOURCE) and file.parent != SOURCE:
        folder = UNITS / file.parent.relative_to(SOURCE)
        target = next(place for place in (folder, *folder.parents) if (ROOT / place).is_dir())
        target = target if target.is_relative_to(UNITS) and target != UNITS else None
    elif file.is_relative_to(SOURCE) or file.parts[:1] == ("tools",):
        target = UNITS / f"test_{file.stem}.py"
    else:
        target = None
    return str(target) if target and target != Path("tests") and (ROOT / target).exists() else None


def without_repeats(paths: Iterable[str]) -> list[str]:
    """The paths in order, less those that lie in another."""
    every = sorted(set(paths))
    return [path for path in every if not any(Path(path) != Path(o) and Path(path).is_relative_to(o) for o in every)]


def main() -> None:
    base = sys.argv[1] if len(sys.argv) > 1 else None
    found = [tests for path in changed_files(base) if (tests := tests_of(path))]
    print(" ".join(without_repeats(found)))


if __name__ == "__main__":
    main()
