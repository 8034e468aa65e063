"""The walls that this machine offers, a test that they hold, and their description in plain words."""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from posttrain.errors import ConfigError, Problem
from posttrain.sandbox import kernel, landlock
from posttrain.sandbox.boxes import BoxError, Program, close, run, waiting
from posttrain.sandbox.walls import WALLS, BoxLimits

# At least one of each must be up for a program to count as boxed in. BoxLimits of time, memory, output and files, no privileges,
# no environment and no open files are there whatever the kernel offers.
NEEDED = {
    "files of the host": ("mount", "landlock"),
    "the network": ("network", "seccomp"),
    "other processes": ("pid", "seccomp"),
}
_ESCAPES = """
import json, os, sys
canary, port, sibling, queue = json.load(sys.stdin)
got = []
def attempt(name, what):
    try:
        what()
    except Exception:
        return
    got.append(name)
def dial():
    import socket
    with socket.socket() as s:
        s.settimeout(2)
        s.connect(("127.0.0.1", port))
def reach_a_queue():
    import ctypes
    if ctypes.CDLL(None).msgctl(queue, 2, ctypes.create_string_buffer(1024)) < 0:  # IPC_STAT
        raise OSError
def watch_a_folder():
    import ctypes
    libc = ctypes.CDLL(None)
    if libc.inotify_add_watch(libc.inotify_init1(0), os.path.dirname(canary).encode(), 0x100) < 0:  # IN_CREATE
        raise OSError
attempt("read a file of the host", lambda: open(canary).read())
attempt("write a file of the host", lambda: open(sibling, "w"))
attempt("list a folder of the host", lambda: os.listdir(os.path.dirname(canary)))
attempt("reach a port of this machine", dial)
attempt("reach a message queue of another process", reach_a_queue)
attempt("watch a folder of the host", watch_a_folder)
attempt("see the environment", lambda: os.environ["PATH"])
attempt("signal another process", lambda: os.kill(os.getppid() or 1 / 0, 0))  # 0: it sees no parent
print(json.dumps(got))
"""


@dataclass(frozen=True, slots=True)
class Layer:
    name: str
    on: bool
    reason: str  # what it does when it is on, why it is not when it is off


@dataclass(frozen=True, slots=True)
class Layers:
    """The walls of a box on this machine, and the escapes that a test program has found."""

    layers: tuple[Layer, ...]
    escapes: tuple[str, ...] = ()  # what a program that tried could do all the same

    @property
    def walls(self) -> tuple[str, ...]:
        return tuple(layer.name for layer in self.layers if layer.on)

    @property
    def missing(self) -> list[str]:
        """Things that no wall denies, in words."""
        on = set(self.walls)
        return [what for what, walls in NEEDED.items() if not on & set(walls)]

    @property
    def enough(self) -> bool:
        return not self.missing and not self.escapes


@functools.cache
def probe() -> Layers:
    """Try, once in this process, which walls can be put up here, by making boxes; and send a program into the best of them that
    tries to get out, at files and a listener that are made for this. Takes a few tenths of a second."""
    if sys.platform != "linux":
        return _none(f"boxes are made by Linux, and this is {sys.platform}")
    wanted = list(WALLS)
    off: dict[str, str] = {}
    before = waiting()  # they are for others: a worker has started its own so that it may outlive calls
    try:
        while True:
            try:
                escapes = _try_to_escape(wanted)
                break
            except BoxError as error:
                if error.wall not in wanted:
                    return _none(str(error))
                off[error.wall] = str(error).removeprefix(f"{error.wall}: ")
                wanted.remove(error.wall)
    finally:
        close(but=before)
    return Layers(
        tuple(Layer(name, name in wanted, _does(name) if name in wanted else off[name]) for name in WALLS), escapes
    )


def probed() -> Layers | None:
    """The result of ``probe``, where something in this process runs code and has called it; else None."""
    return probe() if probe.cache_info().currsize else None


def walls_for(needed_by: str, *, allow_unboxed: bool) -> tuple[str, ...]:
    """The walls for running model-written code here.

    Raises: ConfigError when they are not enough and ``allow_unboxed`` is false.
    """
    layers = probe()
    if not layers.enough and not allow_unboxed:
        what = f"{needed_by} runs code, and this machine cannot box it in: {'; '.join(shortcomings(layers))}"
        why = "; ".join(f"{layer.name}: {layer.reason}" for layer in layers.layers if not layer.on)
        fix = "use a Linux kernel with Landlock, or allow user namespaces in the container; reward.allow_unboxed_code=true "
        raise ConfigError(Problem(f"{what} ({why})", fix=fix + "runs it unprotected, with what this user may do"))
    return layers.walls


def describe(layers: Layers) -> str:
    """Describe the walls in plain words, one line each, for the plan of a run."""
    lines = [f"  {'on ' if layer.on else 'off'}  {layer.name:<9} {layer.reason}" for layer in layers.layers]
    if layers.enough:
        head = "Model-written code runs in a box:"
    else:
        head = "This machine cannot box model-written code in: " + "; ".join(shortcomings(layers))
    return "\n".join([head, *lines])


def shortcomings(layers: Layers) -> list[str]:
    return [
        *(f"nothing keeps it from {what}" for what in layers.missing),
        *(f"a program that tried could {what}" for what in layers.escapes),
    ]


def _does(name: str) -> str:
    return f"{WALLS[name]} (version {landlock.version()})" if name == "landlock" else WALLS[name]


def _none(reason: str) -> Layers:
    return Layers(tuple(Layer(name, False, reason) for name in WALLS))


def _try_to_escape(walls: list[str]) -> tuple[str, ...]:
    """Run the test program behind these walls; returns its escapes. Raises: BoxError."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        os.chmod(folder, 0o777)  # nothing but the box is to keep the program out
        canary = Path(folder, "canary")
        canary.write_text("canary", encoding="utf-8")
        canary.chmod(0o666)
        with kernel.message_queue() as queue:
            given = [str(canary), listener.getsockname()[1], str(Path(folder, "written")), queue]
            done = run(Program(source=_ESCAPES, stdin=json.dumps(given)), BoxLimits(timeout_s=20.0), walls)
        if not done.finished:
            raise BoxError("", f"a program in the box did not run: {done.why()}")
        return tuple(json.loads(done.stdout))
