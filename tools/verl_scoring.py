"""Write src/posttrain/verl_scoring.json: digests of every definition in the history of verl's scoring files.

    python tools/verl_scoring.py path/to/verl.git [more.git]

Needs a clone of verl with its whole history; nothing of its text is kept.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
sys.path.insert(0, str(SOURCE))

from posttrain.verl_scoring import CODE, definitions  # noqa: E402


def blobs(clone: str) -> set[str]:
    """The names of all objects that stood below the scoring paths at any commit."""
    said = subprocess.run(
        ["git", "-C", clone, "log", "--all", "--raw", "--no-abbrev", "-m", "--no-renames", "--format=", "--", *CODE],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    lines = [line.split() for line in said.splitlines() if line.startswith(":")]
    return {parts[3] for parts in lines if parts[-1].endswith(".py") and set(parts[3]) != {"0"}}


def main() -> None:
    digests: set[str] = set()
    for clone in sys.argv[1:]:
        for name in blobs(clone):
            text = subprocess.run(
                ["git", "-C", clone, "cat-file", "blob", name], capture_output=True, check=False
            ).stdout
            try:
                digests.update(digest for _, digest in definitions(ast.parse(text)))
            except (SyntaxError, ValueError):
                continue
    table = {"about": "digests of verl's scoring code (tools/verl_scoring.py)", "digests": "".join(sorted(digests))}
    (SOURCE / "posttrain" / "verl_scoring.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(f"{len(digests)} definitions")


if __name__ == "__main__":
    main()
