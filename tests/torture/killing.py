"""Kills saves and runs, and looks at what is left. `make torture` runs all of it; test_killed_saves.py and others a part.

One process imports torch and forks: a trial costs a fork, not a start. In every trial a child saves step 2 beside step 1
(keep_last 1, so that a deletion is part of it) and says so when it is done; it is killed on the way. Then the checkpoints are
restored as a run would: the step must be no older than the last acknowledged one, every file must have the hash of the
reference, and a save of step 3 must go through.
"""

from __future__ import annotations

import builtins
import hashlib
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from posttrain.backends.train.local import LocalTrainEngine
from posttrain.config.model import ModelConfig
from posttrain.config.policy import OptimizerConfig
from posttrain.errors import RunStopped
from posttrain.models.loading import load_causal_lm, load_tokenizer
from posttrain.run.checkpoint import Checkpoints
from posttrain.run.progress import Progress
from posttrain.run.retention import Retention


class Position:
    """A data position that is a number."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def state(self) -> dict[str, int]:
        return {"position": self.position}

    def restore(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Work:
    """A real engine on a tiny model, whose state after each step is known. ``background``: saves are made in a thread."""

    def __init__(self, model: Path, folder: Path, *, background: bool = False) -> None:
        self.folder = folder
        self.background = background
        self.engine = LocalTrainEngine(
            load_causal_lm(str(model), dtype=torch.float32),
            load_tokenizer(ModelConfig(path=str(model))),
            optimizer=OptimizerConfig(lr=1e-3),
            learning_rate_factor=lambda update: 1.0,
            sequences_per_micro_batch=1,
            sequences_per_scoring_batch=1,
        )
        self.reference: dict[int, dict[str, str]] = {}
        whole = Checkpoints(folder / "reference")
        for step in (1, 2, 3):
            self.become(step)
            whole.save(step, Progress(policy=self.engine, loader=Position(step)))
            self.reference[step] = hashes(folder / f"reference/global_step_{step}")

    def become(self, step: int) -> None:
        """The state after ``step``: weights and gradients from a seed, and an update."""
        generator = torch.Generator().manual_seed(step)
        for parameter in self.engine._masters.parameters.values():
            parameter.data = torch.randn(parameter.shape, generator=generator)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        self.engine._optimizer.state.clear()
        self.engine.optimizer_step()
        self.engine._count.restore({"updates": step})

    def save(self, checkpoints: Checkpoints, step: int) -> None:
        """Save the engine's state as that after ``step``; it is saved when this returns."""
        checkpoints.save(step, Progress(policy=self.engine, loader=Position(step)), background=self.background)
        checkpoints.wait()

    def name(self, sweep: str) -> str:
        return f"{sweep} in the background" if self.background else sweep

    def start(self, trial: Path) -> Checkpoints:
        """A run folder with the checkpoint of step 1; the engine is in the state after step 2."""
        shutil.rmtree(trial, ignore_errors=True)
        trial.mkdir(parents=True)
        shutil.copytree(self.folder / "reference/global_step_1", trial / "global_step_1")
        (trial / "latest").write_text("global_step_1\n")
        return Checkpoints(trial, Retention(last=1))

    def verdict(self, trial: Path, acknowledged: int) -> str | None:
        """What is wrong with what a killed save has left; None when nothing is."""
        checkpoints = Checkpoints(trial, Retention(last=1))
        position = Position()
        try:
            step = checkpoints.restore(Progress(policy=_Reader(), loader=position), lambda said: None)  # type: ignore[arg-type]
            if step < acknowledged:
                return f"resumed at step {step}, and step {acknowledged} had been acknowledged"
            if position.position != step or hashes(trial / f"global_step_{step}") != self.reference[step]:
                return f"step {step} is not what was saved"
            checkpoints.save(
                3, Progress(policy=_Copier(self.folder / "reference/global_step_3/policy"), loader=Position(3))
            )  # type: ignore[arg-type]
            if hashes(trial / "global_step_3") != self.reference[3]:
                return "the next save is not what it should be"
            left = sorted(path.name for path in trial.iterdir())
        except Exception:  # noqa: BLE001  # any failure is a finding
            return traceback.format_exc()
        return None if left == ["global_step_3", "latest"] else f"left behind: {left}"


class _Reader:
    """Takes nothing: restore() has compared the hashes."""

    def load(self, folder: Path, *, optimizer: bool, schedule: bool) -> None:
        pass


class _Copier:
    """Saves what another has saved: the next save needs no tensors in this process."""

    def __init__(self, source: Path) -> None:
        self.source = source

    def saved_bytes(self) -> int:
        return 1

    def save(self, folder: Path, *, optimizer: bool) -> None:
        shutil.copytree(self.source, folder, dirs_exist_ok=True)


@dataclass
class Tally:
    """What a sweep has found."""

    name: str
    trials: int = 0
    killed: int = 0  # or stopped, before the save was acknowledged
    how: str = "killed before the save was acknowledged"
    good: str = "all resumed, hashes as the reference"
    resumed_at: dict[int, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def line(self) -> str:
        verdict = f"{len(self.failures)} FAILED" if self.failures else self.good
        return f"{self.name}: {self.trials} trials, {self.killed} {self.how}; {verdict}"


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a checkpoint, its manifest included."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@dataclass
class Child:
    pid: int
    said: int  # read end of the pipe it acknowledges on
    go: int  # write end of the pipe it waits on
    status: int = 0  # how it ended
    stopped_by: str = ""  # the error that its save stopped with

    def begin(self) -> float:
        """Tell it to save. Returns the time at which it has begun."""
        os.write(self.go, b"x")
        assert os.read(self.said, 1) == b"b", "the child died before its save"
        return time.perf_counter()

    def acknowledges_within(self, seconds: float) -> bool:
        return bool(select.select([self.said], [], [], seconds)[0])

    def wait(self) -> int:
        """Its end; what it acknowledged (0 or 2)."""
        _, self.status = os.waitpid(self.pid, 0)
        said = os.read(self.said, 10_000).decode().removeprefix("b")
        os.close(self.said)
        with suppress(OSError):
            os.close(self.go)
        self.stopped_by = said if said != "2" else ""
        return 2 if said == "2" else 0


def saving_child(work: Work, checkpoints: Checkpoints, prepare: Callable[[], None] = lambda: None) -> Child:
    """A forked process that, when told to, says that it begins, saves step 2, and acknowledges it.

    It says so by writev, which a save does not use: what strace does to calls of a save does not meet what is said.
    """
    said, say = os.pipe()
    told, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(said)
        os.close(go)
        os.read(told, 1)
        try:
            os.writev(say, [b"b"])
            prepare()
            work.save(checkpoints, 2)
            os.writev(say, [b"2"])
        except RunStopped as error:
            os.writev(say, [str(error).encode()])
        finally:
            os._exit(0)
    os.close(say)
    os.close(told)
    return Child(pid, said, go)


def random_kills(work: Work, kills: int, seed: int = 0) -> Tally:
    """SIGKILL at a random instant of a save, until so many have hit one: a save that was done before its kill came is a trial
    too, but no kill.

    The instants are spread over a little more than the last duration seen, so one in ten comes too late and measures it anew.
    """
    work.become(2)
    tally, draw = Tally(work.name("SIGKILL at a random instant of a save")), random.Random(seed)
    duration_s = _undisturbed_s(work)
    while tally.killed < kills and tally.trials < 10 * kills:
        child = saving_child(work, work.start(work.folder / "trial"))
        start = child.begin()
        done = child.acknowledges_within(draw.uniform(0, 1.1 * duration_s))
        if done:
            duration_s = time.perf_counter() - start
        else:
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
        count(work, tally, child.wait(), f"trial {tally.trials + 1}")
    return tally


def _undisturbed_s(work: Work) -> float:
    """Seconds that a save takes: the shortest of three."""
    durations = []
    for _ in range(3):
        child = saving_child(work, work.start(work.folder / "trial"))
        start = child.begin()
        assert child.wait() == 2, "a save that nobody disturbed did not go through"
        durations.append(time.perf_counter() - start)
    return min(durations)


# ------------------------------------------------------------------------------------- at every file operation of a save

OPERATIONS = [
    (os, "open"),
    (os, "fsync"),
    (os, "replace"),
    (os, "rename"),
    (os, "unlink"),
    (os, "rmdir"),
    (os, "mkdir"),
    (os, "close"),
    (os, "stat"),
    (os, "listdir"),
    (os, "scandir"),
    (builtins, "open"),
]


def at_operation(number: int, act: Callable[[], Any]) -> Callable[[], None]:
    """What a child has to do so that the ``number``-th file operation of Python code acts first (kills it, or raises)."""

    def patch() -> None:
        count = 0

        def acting(original: Callable[..., Any]) -> Callable[..., Any]:
            def operation(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                count += 1
                if count == number:
                    act()
                return original(*args, **kwargs)

            return operation

        for module, name in OPERATIONS:
            setattr(module, name, acting(getattr(module, name)))

    return patch


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def operation_kills(work: Work, *, first: int = 1, stride: int = 1) -> Tally:
    """SIGKILL before every ``stride``-th file operation, from the ``first`` one on, that Python code makes in a save, until one
    has no such operation."""
    work.become(2)
    tally = Tally(work.name("SIGKILL at every file operation of a save"))
    number = first
    while True:
        child = saving_child(work, work.start(work.folder / "trial"), at_operation(number, kill_self))
        child.begin()
        acknowledged = child.wait()
        if not os.WIFSIGNALED(child.status):
            assert acknowledged == 2
            return tally
        count(work, tally, acknowledged, f"operation {number}")
        number += stride


def strace_kills(work: Work, *, stride: int = 1) -> Tally:
    """SIGKILL at the entry of every ``stride``-th system call that has to do with files, of Python and of what is compiled."""
    work.become(2)
    tally = Tally(work.name("SIGKILL at every system call of a save"))
    calls = traced_calls(work)
    # One counter per kind of call is what strace has, so each kind is swept by its own numbers.
    for name, times in calls.items():
        for number in range(1 + (name == "writev"), times + 1, stride):  # the first writev says that the save begins
            child = saving_child(work, work.start(work.folder / "trial"))
            tracer = trace(child, ["-e", f"trace={name}", "-e", f"inject={name}:signal=SIGKILL:when={number}"])
            acknowledged = child.wait()
            tracer.wait()
            count(work, tally, acknowledged, f"{name} {number}")
    return tally


CALLS = (
    "openat,write,pwrite64,writev,fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat,rmdir,"
    "ftruncate,fallocate,msync,munmap,close,read,lseek,newfstatat,fstat,getdents64,copy_file_range,sendfile,statfs,ioctl"
)


def traced_calls(work: Work) -> dict[str, int]:
    """How often a whole save makes each call."""
    child = saving_child(work, work.start(work.folder / "trial"))
    log = work.folder / "strace.log"
    tracer = trace(child, ["-e", f"trace={CALLS}"], log)
    assert child.wait() == 2, "the save did not go through under strace"
    tracer.wait()
    counts: dict[str, int] = {}
    for name in re.findall(r"^\d+ +(\w+)\(", log.read_text(errors="replace"), re.MULTILINE):
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items()))


def trace(child: Child, options: list[str], log: Path | None = None) -> subprocess.Popen[str]:
    """strace attached to a child, which then gets to work."""
    command = ["strace", "-f", "-o", str(log or "/dev/null"), *options, "-p", str(child.pid)]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr
    assert "attached" in (said := tracer.stderr.readline()), f"strace cannot attach: {said}"
    os.write(child.go, b"x")
    return tracer


def count(work: Work, tally: Tally, acknowledged: int, where: str, at_least: int = 1) -> None:
    """Look at what a trial has left: the step to resume at is no older than the acknowledged one and ``at_least``."""
    tally.trials += 1
    tally.killed += not acknowledged
    if failure := work.verdict(work.folder / "trial", max(acknowledged, at_least)):
        tally.failures.append(f"{where}: {failure}")


# ------------------------------------------------------------------------------------------------- kills over a whole run


def forked(train: Callable[[], object]) -> int:
    """Start ``train`` in a forked process. Returns its id; its exit status is 1 after an error."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            train()
            code = 0
        except BaseException:  # noqa: BLE001  # a child must not go on as its parent
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def run_with_kills(train: Callable[[], Path], killed: Path, straight: Path, *, kills: int, seed: int = 0) -> int:
    """Start ``train``, whose run folder is ``killed``, in a forked process again and again, killed ``kills`` times, then left
    alone. Returns how many of the kills hit a living process.

    A kill comes at a random instant after the process has recorded a random number of steps, at most three: counted in steps,
    not in seconds since its start, so that a run that is faster than it was a moment ago is not done before it is killed.
    ``straight`` is the folder of the same run undisturbed, which says how long a step takes.

    Raises: RuntimeError when a process that was not killed does not end well.
    """
    draw, hit, step_s = random.Random(seed), 0, seconds_per_step(straight)
    for left in range(kills, -1, -1):
        pid = forked(train)
        if left and not ended_before(pid, killed / "metrics.jsonl", draw.randint(0, 3)):
            time.sleep(draw.uniform(0, step_s))
            os.kill(pid, signal.SIGKILL)  # it may have ended: nobody has waited for it, so the number is still its own
        _, status = os.waitpid(pid, 0)
        hit += os.WIFSIGNALED(status)
        if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status):
            raise RuntimeError(f"the run failed when it was started again, with {left} kills left")
    return hit


def seconds_per_step(run: Path) -> float:
    """The mean over a run's steps."""
    return mean(json.loads(line)["time/step_s"] for line in (run / "metrics.jsonl").read_text().splitlines())


def ended_before(pid: int, records: Path, steps: int) -> bool:
    """Wait until a process has added ``steps`` records to a file. Returns: it ended before; it can still be waited for."""
    size, added = file_bytes(records), 0
    while added < steps:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return True
        now = file_bytes(records)
        added += now > size
        size = now  # smaller where a resumed run has taken back the records of steps it makes again
        time.sleep(0.002)
    return False


def file_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
