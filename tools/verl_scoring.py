"""Write src/posttrain/verl_scoring.json and verl_updates.json: digests of every definition in the history of verl's scoring
files, and of every function and method in that of its losses and updates.

    python tools/verl_scoring.py path/to/verl.git [more.git]

Needs a clone of verl with its whole history; nothing of its text is kept.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
sys.path.insert(0, str(SOURCE))

from posttrain import verl_scoring, verl_updates  # noqa: E402


def blobs(clone: str, code: Sequence[str]) -> set[str]:
    """The names of all objects that stood below some paths at any commit."""
    said = subprocess.run(
        ["git", "-C", clone, "log", "--all", "--raw", "--no-abbrev", "-m", "--no-renames", "--format=", "--", *code],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    lines = [line.split() for line in said.splitlines() if line.startswith(":")]
    return {parts[3] for parts in lines if parts[-1].endswith(".py") and set(parts[3]) != {"0"}}


def texts(clone: str, code: Sequence[str]) -> Iterator[bytes]:
    names = sorted(blobs(clone, code))
    command = ["git", "-C", clone, "cat-file", "--batch"]
    said = subprocess.run(command, input="\n".join(names).encode(), capture_output=True, check=True).stdout
    place = 0
    while place < len(said):
        end = said.index(b"\n", place)
        head = said[place:end].split()
        size = int(head[2]) if len(head) == 3 else -1
        if size >= 0:
            yield said[end + 1 : end + 1 + size]
        place = end + 1 + size + 1


def of_updates(source: ast.Module) -> Iterator[tuple[str, str]]:
    return ((name, verl_scoring.digest_of(node)) for name, node in verl_updates.functions(source))


def write(name: str, what: str, code: Sequence[str], found: Callable[[ast.Module], Iterator[tuple[str, str]]]) -> None:
    digests: set[str] = set()
    for clone in sys.argv[1:]:
        for text in texts(clone, code):
            try:
                digests.update(digest for _, digest in found(ast.parse(text)))
            except (SyntaxError, ValueError):
                continue
    table = {"about": f"digests of verl's {what} (tools/verl_scoring.py)", "digests": "".join(sorted(digests))}
    (SOURCE / "posttrain" / f"{name}.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(f"{name}: {len(digests)} definitions")


def main() -> None:
    write("verl_scoring", "scoring code", verl_scoring.CODE, verl_scoring.definitions)
    write("verl_updates", "advantages, losses and updates", verl_updates.CODE, of_updates)


if __name__ == "__main__":
    main()
