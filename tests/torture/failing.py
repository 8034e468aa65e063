"""Disks that fail or fill up under a save, and trainers that meet in one folder."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from unittest import mock

import killing
from killing import Child, Tally, Work

from posttrain.errors import RequestError, RunStopped
from posttrain.run import lock

# The calls in which a file system fails that cannot be written to.
WRITING = ("openat", "write", "pwrite64", "fsync", "rename", "mkdir", "ftruncate", "unlinkat", "rmdir")
STOPPED = "stopped the run, the others did no harm"


def failing_operations(work: Work, code: int, *, stride: int = 1) -> tuple[Tally, set[str]]:
    """An error of the disk at every ``stride``-th file operation that Python code makes in a save: the run must stop with a
    checkpoint to go on from, or the error do no harm. Returns the reasons given, too."""
    tally = Tally(work.name(f"{errno.errorcode[code]} at every file operation of a save"), how=STOPPED)
    reasons: set[str] = set()
    work.become(2)
    number = 1
    while True:
        came, comes = os.pipe()

        def fail(comes: int = comes) -> None:
            os.write(comes, b"!")
            raise OSError(code, os.strerror(code))

        child = killing.saving_child(work, work.start(work.folder / "trial"), killing.at_operation(number, fail))
        child.begin()
        acknowledged = child.wait()
        reached = select.select([came], [], [], 0)[0]
        os.close(came)
        os.close(comes)
        if not reached:
            return tally, reasons
        _judge(work, tally, child, acknowledged, f"operation {number}")
        reasons.add(child.stopped_by.rpartition(": ")[2])
        number += stride


def failing_calls(work: Work, code: int, *, stride: int = 1) -> Tally:
    """The same at system calls, of what is compiled, too: strace makes the error."""
    tally = Tally(work.name(f"{errno.errorcode[code]} at every system call that writes of a save"), how=STOPPED)
    work.become(2)
    for name, calls in killing.traced_calls(work).items():
        for number in range(1, calls + 1, stride) if name in WRITING else ():
            child = killing.saving_child(work, work.start(work.folder / "trial"))
            inject = f"inject={name}:error={errno.errorcode[code]}:when={number}"
            tracer = killing.trace(child, ["-e", f"trace={name}", "-e", inject])
            acknowledged = child.wait()
            tracer.wait()
            _judge(work, tally, child, acknowledged, f"{name} {number}")
    return tally


def _judge(work: Work, tally: Tally, child: Child, acknowledged: int, where: str) -> None:
    """A save that could not change what lies around the new checkpoint says that this one is whole."""
    whole = acknowledged or "is whole" in child.stopped_by
    if not acknowledged and not child.stopped_by:
        tally.failures.append(f"{where}: the save ended in another error than RunStopped")
    killing.count(work, tally, acknowledged, where, at_least=2 if whole else 1)


def can_mount() -> bool:
    """Whether this process may mount a small file system."""
    with tempfile.TemporaryDirectory() as folder:
        if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=False).returncode:
            return False
        subprocess.run(["umount", folder], check=True)
        return True


def full_disks(work: Work, disk: Path, *, looks: bool) -> Tally:
    """Room for the checkpoint of step 1 and 5, 15, ... 95 % of another, on a small file system mounted at ``disk``. The save
    ``looks`` how much is free before it writes, or finds out while it does."""
    tally = Tally(
        f"disk full at ten sizes, {'seen before' if looks else 'found while writing'}",
        how="stopped the run",
        good="the one before whole",
    )
    work.become(2)
    size = sum(path.stat().st_size for path in (work.folder / "reference/global_step_1").rglob("*") if path.is_file())
    pages = 4096 * (12 + 4)  # files and folders take whole pages
    needed = work.engine.saved_bytes() if looks else 0
    for percent in range(5, 105, 10):
        options = f"size={int(size * (1 + percent / 100)) + pages}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk], check=True)
        try:
            with mock.patch.object(work.engine, "saved_bytes", lambda: needed):
                failure = _save_on_full_disk(work, disk / "trial")
        finally:
            subprocess.run(["umount", disk], check=True)
        tally.trials += 1
        tally.killed += failure is None
        if failure:
            tally.failures.append(f"room for {percent} %: {failure}")
    return tally


def _save_on_full_disk(work: Work, trial: Path) -> str | None:
    try:
        work.save(work.start(trial), 2)
        return "it was saved all the same"
    except RunStopped as error:
        if " free; nothing" not in str(error) and os.strerror(errno.ENOSPC) not in str(error):
            return f"the reason given is another one: {error}"
    left = sorted(path.name for path in trial.iterdir())
    whole = left == ["global_step_1", "latest"] and killing.hashes(trial / "global_step_1") == work.reference[1]
    return None if whole else f"left behind: {left}"


def two_trainers(folder: Path, rounds: int) -> Tally:
    """Two processes want one folder at the same instant: one gets it, the other is refused. Both are killed, and the next
    start takes the folder over."""
    how, good = "pairs killed, one of each with the lock", "the other was refused, the next start took over"
    tally = Tally("two trainers in one folder", how=how, good=good)
    with mock.patch.object(lock, "PATIENCE_S", 0.1):
        for number in range(1, rounds + 1):
            run = folder / f"run_{number % 3}"  # new folders, and such with the lock of a process that was killed
            pair = [_locking_child(run), _locking_child(run)]
            for child in pair:
                os.write(child.go, b"x")
            said = {os.read(child.said, 1) for child in pair}
            for child in pair:
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
                child.wait()
            heir = _locking_child(run)
            os.write(heir.go, b"x")
            then = os.read(heir.said, 1)
            os.write(heir.go, b"x")
            heir.wait()
            tally.trials += 1
            tally.killed += 1
            if said != {b"+", b"-"} or then != b"+":
                tally.failures.append(f"round {number}: the two said {said}, the next one {then!r}")
    return tally


def _locking_child(folder: Path) -> Child:
    """A process that, told to, takes a folder's lock and says + (has it) or - (was refused), and holds it until told again."""
    said, say = os.pipe()
    told, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(Exception):
            os.read(told, 1)
            try:
                with lock.only_trainer(folder):
                    os.write(say, b"+")
                    os.read(told, 1)
            except RequestError:
                os.write(say, b"-")
        os._exit(0)
    os.close(say)
    os.close(told)
    return Child(pid, said, go)
