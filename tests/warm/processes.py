"""Processes that are ready when they start: forked from a server that has imported what they need (``server.py``).

The server is started at the first request, one for each process of the test run, and ends with it.
"""

from __future__ import annotations

import atexit
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

from posttrain.processes.start import start as cold_start
from warm.client import CHILDREN, SOCKET, STAND_IN, WARM_CHILDREN, ask, end_of

HERE = Path(__file__).parent
LOOK_S = 0.5  # after which a thread that waits for a process looks whether another has seen its end
_offered = False


def offer() -> None:
    """Have this process and those that it starts find a server, which is started when one of them asks for a process."""
    global _offered
    if _offered:
        return
    _offered = True
    folder = Path(tempfile.mkdtemp(prefix="ptw-", dir="/tmp"))  # short: a socket's name may have 107 characters
    (folder / CHILDREN).mkdir()
    (folder / STAND_IN).write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -I -S "{HERE}/stand_in.py" "{folder}/socket" "$@"\n'
    )
    (folder / STAND_IN).chmod(0o700)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen(64)
    life, ours = os.pipe()  # ours closes when this process ends, however it does
    os.environ[SOCKET] = str(folder / "socket")
    threading.Thread(target=_start, args=(listener, life), daemon=True).start()
    atexit.register(_end, folder, ours, os.getpid())


def _start(listener: socket.socket, life: int) -> None:
    """Start the server when somebody asks for a process."""
    select.select([listener], [], [])
    command = [sys.executable, str(HERE / "server.py"), str(listener.fileno()), str(life)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    environment["OMP_NUM_THREADS"] = "1"  # see one_thread in conftest.py
    environment["PYTHONHASHSEED"] = "0"  # as posttrain starts its own processes
    files = listener.fileno(), life
    subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, pass_fds=files, start_new_session=True)


def _end(folder: Path, ours: int, owner: int) -> None:
    if os.getpid() == owner:  # not in a process that was forked from it
        os.close(ours)
        shutil.rmtree(folder, ignore_errors=True)


def warm_python() -> str:
    """A program that may be started in the place of this Python: what it runs is warm."""
    offer()
    return str(Path(os.environ[SOCKET]).with_name(STAND_IN))


def warm_ray_workers() -> None:
    """Have the clusters that this process starts fork their workers from the server, where there is one."""
    from ray._private import ray_constants

    ray_constants.SETUP_WORKER_FILENAME = str(HERE / "ray_worker.py")


def stand_ins() -> dict[int, int]:
    """Workers of Ray by the processes that Ray has started in their place: the parent of a worker is the server."""
    found = {}
    for note in (Path(os.environ[SOCKET]).parent / CHILDREN).iterdir() if SOCKET in os.environ else ():
        with suppress(OSError, ValueError):
            found[int(note.name)] = int(note.read_text())
    return found


class WarmProcess:
    """A ``subprocess.Popen`` of Python, as far as tests need one, in a session of its own."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        text: bool = False,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        imports: Sequence[str] = (),
        children: bool = False,
    ):
        """Args: command, of this Python or a script in it; stdin (by default it reads nothing) and stdout may be pipes; stderr a
        file, or what stdout is; children, whether the processes of Python that it starts are warm too."""
        offer()
        words = [str(word) for word in command]
        environment = dict(os.environ if env is None else env)
        if children:
            environment[WARM_CHILDREN] = "1"
        self.args = words
        self.stdin: IO[Any] | None = None
        self.stdout: IO[Any] | None = None
        self._read: list[Any] = []
        self._reader: threading.Thread | None = None
        self.returncode: int | None = None
        self._lock = threading.Lock()
        pipe = os.pipe() if stdout == subprocess.PIPE else None
        given = os.pipe() if stdin == subprocess.PIPE else None
        with open(os.devnull, "r+b") as nothing:
            read = given[0] if given else nothing.fileno() if stdin is None else _file(stdin, nothing, 0)
            output = pipe[1] if pipe else _file(stdout, nothing, 1)
            errors = output if stderr == subprocess.STDOUT else _file(stderr, nothing, 2)
            self._connection, self.pid = ask(
                os.environ[SOCKET],
                words[words[0] == sys.executable :],
                environment,
                (read, output, errors, *pass_fds),
                folder=str(cwd) if cwd else None,
                numbers=(0, 1, 2, *pass_fds),
                imports=imports,
            )
        if given:
            os.close(given[0])
            self.stdin = os.fdopen(given[1], "wb", 0)
        if pipe:
            os.close(pipe[1])
            self.stdout = os.fdopen(pipe[0], "r" if text else "rb")

    def fileno(self) -> int:
        """Of what can be read when it has ended."""
        return self._connection.fileno()

    def poll(self) -> int | None:
        with self._lock:  # several threads may ask
            if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
                self.returncode = end_of(self._connection)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises: subprocess.TimeoutExpired."""
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = LOOK_S if until is None else min(LOOK_S, until - time.monotonic())
            if left <= 0:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            with suppress(OSError, ValueError):  # another thread has seen its end
                select.select([self._connection], [], [], left)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def communicate(self, timeout: float | None = None) -> tuple[Any, None]:
        """What it prints until its end, and None. Raises: subprocess.TimeoutExpired; then this may be called again."""
        if self.stdout and not self._reader:
            output = self.stdout
            self._reader = threading.Thread(target=lambda: self._read.append(output.read()), daemon=True)
            self._reader.start()
        if self._reader:
            self._reader.join(timeout)
            if self._reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(timeout)
        return (self._read[0] if self._read else None), None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.stdout:
            self.stdout.close()
        self.wait()


def start_warm(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    stdout: int | IO[bytes] = subprocess.DEVNULL,
    stderr: int | IO[bytes] | None = None,
    pass_fds: Sequence[int] = (),
    cwd: str | None = None,
) -> Any:
    """posttrain.processes.start's ``start``, which runs a module of Python in a warm process."""
    files: dict[str, Any] = {"stdin": stdin, "stdout": stdout, "stderr": stderr, "pass_fds": pass_fds, "cwd": cwd}
    if list(command[:2]) == [sys.executable, "-m"]:
        return WarmProcess(command, env=environment, **files)
    return cold_start(command, environment=environment, **files)


def run(
    command: Sequence[str | Path],
    *,
    capture_output: bool = False,
    text: bool = False,
    check: bool = False,
    timeout: float | None = None,
    **more: Any,
) -> subprocess.CompletedProcess[Any]:
    """``subprocess.run`` of a warm process."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        files: dict[str, Any] = {"stdout": output, "stderr": errors} if capture_output else {}
        process = WarmProcess(command, **files, **more)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        said: list[Any] = []
        for file in (output, errors):
            file.seek(0)
            said.append((file.read().decode() if text else file.read()) if capture_output else None)
        done = subprocess.CompletedProcess(process.args, code, *said)
        if check:
            done.check_returncode()
        return done


def have_imported(*names: str) -> None:
    """Have the server import modules, which all processes that are forked after this one then have."""
    WarmProcess([sys.executable, "-c", "pass"], imports=names).wait()


BEGIN = """
import pickle, sys
file, rank = sys.argv[1:]
sys.path[:] = pickle.load(open(file + ".path", "rb"))
function, arguments = pickle.load(open(file, "rb"))
function(int(rank), *arguments)
"""


def on_ranks(function: Callable[..., object], arguments: Sequence[Any], ranks: int) -> None:
    """``torch.multiprocessing.spawn`` with warm processes: each calls the function with its rank and the arguments.

    Raises: RuntimeError when one fails; the others are killed then.
    """
    with tempfile.TemporaryDirectory() as folder:
        call = Path(folder) / "call"
        call.write_bytes(pickle.dumps((function, arguments)))
        Path(f"{call}.path").write_bytes(pickle.dumps(sys.path))
        running = [WarmProcess([sys.executable, "-c", BEGIN, call, str(rank)]) for rank in range(ranks)]
        try:
            while running:
                select.select(running, [], [])
                ended = [process for process in running if process.poll() is not None]
                if wrong := [process for process in ended if process.returncode]:
                    raise RuntimeError(f"a rank ended with exit code {wrong[0].returncode}; what it said is above")
                running = [process for process in running if process not in ended]
        finally:
            for process in running:
                process.kill()
                process.wait()


def _file(given: int | IO[Any] | None, nothing: IO[Any], usual: int) -> int:
    """The number of a file that is given as ``subprocess`` takes it."""
    if given is None:
        return usual
    if isinstance(given, int):
        return nothing.fileno() if given == subprocess.DEVNULL else given
    return given.fileno()
