"""Python programs that the model wrote, each run in a box of its own (docs/sandbox.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.tool import Tool, ToolFailed, parameters
from posttrain.registry import TOOLS
from posttrain.sandbox.boxes import BoxError, Program, run
from posttrain.sandbox.layers import walls_for
from posttrain.sandbox.walls import Limits


@TOOLS.register("python")
def python(*, timeout_s: float = 5.0, memory_mib: int = 1024, allow_unboxed: bool = False) -> Tool:
    """What a program prints; every call starts anew.

    Args: timeout_s and memory_mib of address space for one program; allow_unboxed runs it with what this user may do on a
        machine that cannot box it in.
    Raises: ConfigError when the machine cannot, or for limits that make no sense.
    """
    for name, value in (("timeout_s", timeout_s), ("memory_mib", memory_mib)):
        if value <= 0:
            raise ConfigError(Problem(f"{name} is {value}", fix="use more than 0"))
    limits = Limits(timeout_s=timeout_s, memory_bytes=memory_mib << 20)
    walls = walls_for("the tool python", allow_unboxed=allow_unboxed)
    return Tool(
        name="python",
        description="Runs a Python program and returns what it prints. Nothing is kept from call to call.",
        parameters=parameters(code=("string", "the program; print what you want to see")),
        run=partial(_run, limits=limits, walls=walls),
    )


def _run(arguments: Mapping[str, Any], *, limits: Limits, walls: Sequence[str]) -> str:
    """Standard output, and with an error its last line. Raises: ToolFailed when there is no box to be had."""
    try:
        done = run(Program(source=str(arguments["code"])), limits, walls)
    except BoxError as error:
        raise ToolFailed(f"the program could not be run: {error}") from error
    printed = done.stdout.decode(errors="replace")
    if done.finished:
        return printed or "(nothing was printed)"
    return f"{printed}\n{done.why()}".strip()
