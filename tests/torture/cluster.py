"""Runs with workers of Ray in a process of their own, whose workers are killed or stopped at any instant."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runs import result, tiny_run

from warm.processes import WarmProcess, stand_ins

TESTS = Path(__file__).parents[1]
START_S = 240.0  # for Ray and its workers to start, also on a busy machine
NAMED_S = 10.0  # from the fault to the name of the worker
END_S = 60.0  # from the name to the end of the run
Sections = dict[str, dict[str, Any]]

LAYOUTS: dict[str, Sections] = {
    "one": {"placement": {"runtime": "ray"}},
    "scored": {"placement": {"runtime": "ray"}},
    "trainer": {"policy": {"engine": "fsdp"}, "placement": {"runtime": "ray", "devices": 2}},
    "rollout": {
        "policy": {"devices": [0]},
        "reference": {"devices": [0]},
        "rollout": {"devices": [1]},
        "placement": {"runtime": "ray", "devices": 2},
    },
}

PROGRAM = """
import sys
from warm.processes import warm_ray_workers
warm_ray_workers()
from posttrain.build.train import train_run
from posttrain.cli.errors import run_guarded
from posttrain.config import RunConfig
sys.exit(run_guarded(lambda: train_run(RunConfig.model_validate_json(open(sys.argv[1]).read()))))
"""


@dataclass
class Run:
    """A run under way."""

    folder: Path
    process: WarmProcess
    said: Path  # what it prints
    temporary: Path  # its TMPDIR

    def text(self) -> str:
        return self.said.read_text(errors="replace")

    def steps(self) -> int:
        """Steps whose metrics are written."""
        path = self.folder / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def step_s(self) -> float:
        """Seconds that its last step took."""
        *_, last = (self.folder / "metrics.jsonl").read_text().splitlines()
        return float(json.loads(last)["time/step_s"])

    def wait_for(self, what: str, timeout_s: float) -> float:
        """Seconds until its output holds a pattern."""
        begun = time.monotonic()
        while not re.search(what, " ".join(self.text().split())):
            assert time.monotonic() - begun < timeout_s, f"{what!r} did not come in {timeout_s} s:\n{self.text()}"
            time.sleep(0.1)
        return time.monotonic() - begun


def start(
    folder: Path,
    model: Path,
    layout: str,
    name: str,
    *,
    steps: int,
    tokens: int = 400,
    extra: Sections | None = None,
) -> Run:
    """A run of short steps; with many ``tokens`` in a response there is time to hit the sampling."""
    sections = LAYOUTS[layout].keys() | (extra or {}).keys()
    changes = {name: LAYOUTS[layout].get(name, {}) | (extra or {}).get(name, {}) for name in sections}
    changes.setdefault("policy", {}).update(
        {"sequences_per_mini_batch": 2, "sequences_per_micro_batch_per_device": 1, "optimizer": {"lr": 1e-3}}
    )
    changes["placement"] |= {"device": "cpu", "cpu_threads": 1, "call_timeout_s": 120.0}
    changes["rollout"] = changes.get("rollout", {}) | {
        "samples_per_prompt": 2,
        "max_response_tokens": tokens,
        "ignore_eos": True,
    }
    changes["model"] = {"path": str(model), "compute_dtype": "float32", "config_overrides": {}}
    changes["validation"] = {"before_training": False, "after_training": False}
    changes["checkpoint"] = {"every_steps": 1}
    changes["run"] = {"total_steps": steps, "folder": str(folder / name)}
    config = tiny_run(folder, model, name, steps=steps, **changes)
    written = folder / f"{name}.json"
    written.write_text(config.model_dump_json())
    said = folder / f"{name}.txt"
    temporary = Path(tempfile.mkdtemp(prefix="ptf-"))  # short, as sockets lie in it
    with open(said, "wb") as output:
        process = WarmProcess(
            [sys.executable, "-c", PROGRAM, str(written)],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), "PYTHONPATH": str(TESTS)},
        )
    return Run(folder / name, process, said, temporary)


def descendants(pid: int) -> list[int]:
    """The processes that one has started, these have, and so on; warm workers count as children of what stands in for them."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    for stand_in, worker in stand_ins().items():
        children.setdefault(stand_in, []).append(worker)
    found, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def alive(pids: list[int]) -> list[str]:
    """The commands of those that still run."""
    found = []
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                found.append(f"{pid} {command(pid)[:80]}")
    return found


def left_behind(pids: list[int], folder: Path, segments: set[str], timeout_s: float = 20.0) -> list[str]:
    """Processes (which hold ports), shared memory and files that are still there a while after the end.

    Args: folder is the run's TMPDIR; ``segments`` of shared memory were held by its processes (``held_by``).
    """
    until = time.monotonic() + timeout_s
    while True:
        files = [name for name in sorted(segments) if Path(name).exists()] + sorted(
            str(path) for path in folder.iterdir()
        )
        left = alive(pids) + files
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.2)


def held_by(pids: list[int]) -> set[str]:
    """Segments of shared memory that these processes have mapped or open: found by inode, as a named semaphore is mapped under
    another name. Other runs on this machine come and go with segments of their own."""
    inodes, opened = set(), set()
    for pid in pids:
        with suppress(OSError):  # it has ended
            mapped = (line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
            inodes |= {int(each[4]) for each in mapped if each[-1].startswith("/dev/shm/")}
        with suppress(OSError):
            for each in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    opened.add(os.readlink(each))
    found = set()
    for segment in Path("/dev/shm").iterdir():
        with suppress(OSError):
            if segment.stat().st_ino in inodes or str(segment) in opened:
                found.add(str(segment))
    return found


def wait_until(so: Callable[[], bool], run: Run, timeout_s: float) -> None:
    """Fails when the run ends before, or it is too late."""
    until = time.monotonic() + timeout_s
    while not so():
        assert run.process.poll() is None and time.monotonic() < until, run.text()
        time.sleep(0.05)


def kill_and_go_on(folder: Path, model: Path, extra: Sections, *, steps: int, kills: int, tokens: int = 6) -> list[str]:
    """A run on two ranks whose driver is killed and started again: what of it differs from one that was left alone."""
    straight = start(folder, model, "trainer", "straight", steps=steps, tokens=tokens, extra=extra)
    random_times = random.Random(f"{steps} {kills}")
    try:
        assert straight.process.wait(START_S) == 0, straight.text()
    finally:
        finish(straight)
    hits = 0
    for number in range(kills + 1):
        run = start(folder, model, "trainer", "killed", steps=steps, tokens=tokens, extra=extra)
        try:
            if number == kills:
                assert run.process.wait(START_S) == 0, run.text()
                break
            done, until = run.steps(), time.monotonic() + START_S
            while run.steps() == done and run.process.poll() is None:
                assert time.monotonic() < until, run.text()
                time.sleep(0.01)
            time.sleep(random_times.uniform(0, 0.5))  # some steps long
            hits += run.process.poll() is None
            run.process.kill()
            run.process.wait(END_S)
        finally:
            finish(run)
    wrong = [] if hits > kills // 2 else [f"only {hits} of {kills} kills hit a run"]
    one, other = result(straight.folder), result(folder / "killed")
    return wrong + sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def worker_pid(run: Run, role: str) -> list[int]:
    """The processes of a role's workers: the run says which worker is which, in workers/workers.json."""
    found = json.loads((run.folder / "workers" / "workers.json").read_text())
    return [int(each["pid"]) for name, each in found.items() if name.startswith(f"{role} rank")]


def finish(run: Run) -> None:
    """Whatever happened, nothing of it stays."""
    pids = [run.process.pid, *descendants(run.process.pid)]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.process.wait()
    shutil.rmtree(run.temporary, ignore_errors=True)
