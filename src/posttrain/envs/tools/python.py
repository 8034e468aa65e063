"""Model-written Python programs, each run in a sandbox of its own (docs/sandbox.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from posttrain.interfaces.tool import KEEPS_NOTHING, Tool, ToolFailed, parameters
from posttrain.registry import TOOLS
from posttrain.sandbox.boxes import BoxError, Program, run
from posttrain.sandbox.layers import walls_for
from posttrain.sandbox.walls import BoxLimits
from posttrain.settings import Positive, PositiveInt


@TOOLS.register("python")
def python(*, timeout_s: Positive = 5.0, memory_mib: PositiveInt = 1024, allow_unboxed: bool = False) -> Tool:
    """A tool that runs a program and returns its output; calls share no state.

    Args: timeout_s and memory_mib of address space for one program; allow_unboxed runs it with the rights of this user on a
        machine without a sandbox.
    Raises: ConfigError on a machine without a sandbox.
    """
    limits = BoxLimits(timeout_s=timeout_s, memory_bytes=memory_mib << 20)
    walls = walls_for("the tool python", allow_unboxed=allow_unboxed)
    return Tool(
        name="python",
        description="Runs a Python program and returns what it prints. Nothing is kept from call to call.",
        parameters=parameters(code=("string", "the program; print what you want to see")),
        run=partial(_run, limits=limits, walls=walls),
        **KEEPS_NOTHING,
    )


def _run(arguments: Mapping[str, Any], *, limits: BoxLimits, walls: Sequence[str]) -> str:
    """Return standard output, and after an error its last line. Raises: ToolFailed when no sandbox can be created."""
    try:
        done = run(Program(source=str(arguments["code"])), limits, walls)
    except BoxError as error:
        raise ToolFailed(f"the program could not be run: {error}") from error
    printed = done.stdout.decode(errors="replace")
    if done.finished:
        return printed or "(nothing was printed)"
    return f"{printed}\n{done.why()}".strip()
