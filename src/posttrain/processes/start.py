"""Starting child processes, each in a session of its own, so that it can be ended with its group and Ctrl-C is left to the
trainer; and saying in words how one ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import posttrain
from posttrain.processes import descendants, proc

_SOURCES = Path(posttrain.__file__).parent.parent
_LEAN = "import sys; sys.path.insert(0, sys.argv.pop(1)); from {module} import main; main()"

# One thread per process: the processes are what runs in parallel. The same order of sets in every run. Fewer malloc arenas,
# each of which reserves address space.
ONE_THREAD = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"),
    "PYTHONHASHSEED": "0",
    "MALLOC_ARENA_MAX": "2",
}


def start(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    stdout: int | IO[bytes] = subprocess.DEVNULL,
    stderr: int | IO[bytes] | None = None,
    pass_fds: Sequence[int] = (),
    cwd: str | None = None,
) -> subprocess.Popen[bytes]:
    """Start a program with exactly this environment. Raises: OSError."""
    return subprocess.Popen(
        list(command),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=pass_fds,
        cwd=cwd,
        env=dict(environment),
        start_new_session=True,
        bufsize=0,
    )


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package in a fresh Python; with ``module_path`` it finds the modules that we do."""
    return [sys.executable, "-m", module, *arguments]


def module_path() -> dict[str, str]:
    """The environment variable with which a fresh Python looks for modules where this process does."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def lean_command(module: str, *arguments: str) -> list[str]:
    """The command that calls ``main`` of a module of this package which needs the standard library only.

    Nothing of site-packages (-s -S) or the current folder (-P) is imported, and nothing is written beside the sources (-B).
    """
    code = _LEAN.format(module=module)
    return [sys.executable, "-s", "-S", "-B", "-P", "-X", "utf8", "-c", code, str(_SOURCES), *arguments]


def fork(work: Callable[[], object]) -> int:
    """Fork a child that does ``work`` and ends: in a session of its own, killed by the kernel when this process ends, and before
    others where memory runs out. Returns its pid; the child never returns."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setsid()
        descendants.die_with_parent(parent)
        descendants.be_killed_first()
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - nothing may get into the parent's code on the stack below
        traceback.print_exc()
    finally:
        os._exit(code)


def end(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """Wait for a process that is ending, and kill it when it is still there after ``patience_s``."""
    try:
        process.wait(timeout=patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process of ``start`` at once, with its session's processes and its descendants."""
    below = [*proc.descendants(process.pid), *proc.of_session(process.pid)]
    process.kill()
    descendants.kill_group(process.pid)
    descendants.kill(below)
    process.wait()


def use_no_terminal() -> None:
    """Read nothing from stdin and drop all output, from now on."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.close(nothing)


def ended_in_words(code: int) -> str:
    """Describe how a process ended, from its exit code (minus the signal's number)."""
    return f"exit code {code}" if code >= 0 else f"signal {signal_name(-code)}"


def signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return str(number)
