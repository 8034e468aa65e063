"""Run README's three commands from a wheel to a model that answers, in a new virtual environment, and print their seconds.

Usage: ``python tools/first_commands.py dist/posttrain-0.1.0-py3-none-any.whl [FOLDER]``.

The commands are those of README. FOLDER, by default a temporary one, must be new; it gets the environment and the run. The load
of the machine is printed before and after, because it decides what the seconds are worth.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def commands() -> list[list[str]]:
    """The commands of README's block that begins with the wheel."""
    blocks = README.read_text(encoding="utf-8").split("```bash\n")[1:]
    block = next(text for text in (each.split("```")[0] for each in blocks) if ".whl" in text)
    return [words for line in block.splitlines() if (words := shlex.split(line, comments=True))]


def main() -> int:
    wheel = Path(sys.argv[1]).resolve()
    folder = Path(sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp(prefix="posttrain-first-"))
    venv.create(folder / "environment", with_pip=True)
    programs = folder / "environment" / "bin"
    environment = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    taken = []
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    for words in commands():
        given = [str(wheel) if word.endswith(".whl") else word for word in words]
        print(f"$ {shlex.join(given)}", flush=True)
        started = time.monotonic()
        subprocess.run([str(programs / given[0]), *given[1:]], cwd=folder, env=environment, check=True)
        taken.append(round(time.monotonic() - started))
    print(f"seconds: {' + '.join(map(str, taken))} = {sum(taken)}; load {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
