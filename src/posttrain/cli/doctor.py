"""``posttrain doctor``: report what this machine can run, and how to install the rest. Never imports torch."""

from __future__ import annotations

import os
import platform
from importlib.util import find_spec

import typer


def doctor() -> None:
    """Report what this machine can run, and how to install what is missing."""
    from posttrain.libraries.compilers import find_compiler
    from posttrain.registry import optional_libraries
    from posttrain.sandbox.layers import describe, probe

    typer.echo(f"Python {platform.python_version()}, {platform.system()} {platform.release()}, {platform.machine()}")
    typer.echo(f"{os.cpu_count()} processors\n")
    typer.echo(describe(probe()))
    missing = "not found: sampling on the CPU takes up to 1.8 times as long without one (apt install g++)"
    typer.echo(f"\nC++ compiler: {find_compiler() or missing}")
    typer.echo("\nOptional libraries:")
    for library, extra in optional_libraries().items():
        said = "installed" if find_spec(library) else f"not installed: pip install 'posttrain[{extra}]'"
        typer.echo(f"  {library:<15}{said}")
