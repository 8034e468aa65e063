"""Write requirements/demo.txt and requirements/dev.txt: every package that `make` installs, by its exact version and its hashes.

    pip install uv && python tools/lock.py

Run it after a change of constraints.txt or of the dependencies in pyproject.toml. The versions are those of
constraints.txt; the hashes are those of all files of a version, so that the lists hold on every platform. Which index they
come from is the installer's own setting.

torch stands apart: which of its builds a machine takes (for CPUs, for a CUDA version) is decided by the index, and each has
a hash of its own. It is installed first, by its exact version, and what only it asks for is left out here. The files are
installed with --no-deps, since they are complete.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = {"demo": ("demo",), "dev": ("demo", "dev")}
APART = re.compile(r"torch|triton|nvidia-(?!ml-py).*|cuda-.*|setuptools")
# Builds posttrain itself, without fetching anything unchecked.
BUILD = ("hatchling", "editables")
HEAD = """\
# Written by tools/lock.py: do not edit. Everything but torch, with hashes: pip install --require-hashes --no-deps -r {name}
"""


def main() -> None:
    names = (ROOT / "requirements" / "no-deps.txt").read_text(encoding="utf-8").splitlines()
    alone = [line.partition("#")[0].strip() for line in names if line.partition("#")[0].strip()]
    for name, extras in EXTRAS.items():
        found = {**locked([f".[{','.join(extras)}]", *BUILD], deps=True), **locked(alone, deps=False)}
        kept = [
            block for package, block in sorted(found.items()) if not APART.fullmatch(package) and package != "posttrain"
        ]
        file = ROOT / "requirements" / f"{name}.txt"
        file.write_text(HEAD.format(name=file.relative_to(ROOT)) + "".join(kept), encoding="utf-8")
        print(f"{file.relative_to(ROOT)}: {len(kept)} packages")


def locked(wanted: list[str], *, deps: bool) -> dict[str, str]:
    """Return the lines of each package: its version, and a hash per file."""
    with tempfile.TemporaryDirectory() as folder:
        asked = Path(folder) / "asked.in"
        asked.write_text("\n".join(wanted) + "\n", encoding="utf-8")
        command = ["uv", "pip", "compile", str(asked), "--constraint", "constraints.txt", "--generate-hashes"]
        command += ["--python-version", "3.11", "--no-header", "--no-annotate", "--no-emit-index-url", "--quiet"]
        command += [] if deps else ["--no-deps"]
        text = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    blocks = re.split(r"^(?=\S)", text, flags=re.MULTILINE)
    return {re.split(r"[=\s]", block)[0]: block for block in blocks if "==" in block.partition("\n")[0]}


if __name__ == "__main__":
    main()
