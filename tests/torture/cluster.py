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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runs import result, tiny_run

START_S = 240.0  # for Ray and its workers to start, also on a busy machine
NAMED_S = 10.0  # from the fault to the name of the worker
END_S = 60.0  # from the name to the end of the run
SAMPLER_STEPS = 20  # of a run whose sampler is lost

LAYOUTS = {
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
from posttrain.build import train_run
from posttrain.cli.errors import run_guarded
from posttrain.config import RunConfig
sys.exit(run_guarded(lambda: train_run(RunConfig.model_validate_json(open(sys.argv[1]).read()))))
"""


@dataclass
class Run:
    """A run under way."""

    folder: Path
    process: subprocess.Popen[bytes]
    said: Path  # what it prints
    temporary: Path  # its TMPDIR

    def text(self) -> str:
        return self.said.read_text(errors="replace")

    def steps(self) -> int:
        """Steps whose metrics are written."""
        path = self.folder / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def wait_for(self, what: str, timeout_s: float) -> float:
        """Seconds until its output holds a pattern."""
        begun = time.monotonic()
        while not re.search(what, self.text()):
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
    slow: bool = True,
    extra: dict[str, dict[str, Any]] | None = None,
) -> Run:
    """A run of short steps; ``slow`` ones leave time to hit the sampling."""
    changes = {section: dict(values) for section, values in {**LAYOUTS[layout], **(extra or {})}.items()}
    changes.setdefault("policy", {}).update(
        {"sequences_per_mini_batch": 2, "sequences_per_micro_batch_per_device": 1, "optimizer": {"lr": 1e-3}}
    )
    changes["placement"] |= {"device": "cpu", "cpu_threads": 1, "call_timeout_s": 120.0}
    changes["rollout"] = changes.get("rollout", {}) | {
        "samples_per_prompt": 2,
        "max_response_tokens": 400 if slow else 6,
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
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(written)],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)},
            start_new_session=True,
        )
    return Run(folder / name, process, said, temporary)


def workers_of(run: Run) -> list[int]:
    """Processes of workers that have loaded a model, below a run's process."""
    return [pid for pid in descendants(run.process.pid) if "ray::Worker" in command(pid)]


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
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


def left_behind(pids: list[int], folder: Path, timeout_s: float = 20.0) -> list[str]:
    """Processes, shared memory and folders of Ray that are still there a while after the end."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until and alive(pids):
        time.sleep(0.2)
    files = [str(path) for path in [*folder.glob("pt-ray-*"), *folder.glob("posttrain-worker-*")]]
    return alive(pids) + files


def named(text: str, name: str, how: signal.Signals) -> bool:
    """Whether the output says which worker is lost, and how."""
    word = "is stopped" if how is signal.SIGSTOP else "has died"
    return re.search(rf"{name} rank \d+ \(process \d+ on [\d.]+\) {word}", text) is not None


def lose_a_trainer(folder: Path, model: Path, how: signal.Signals, name: str, delay_s: float) -> list[str]:
    """One trial: what is wrong, after a trainer was hit some time after its first step."""
    run = start(folder, model, "trainer", name, steps=500)
    try:
        until = time.monotonic() + START_S
        while run.steps() < 2:
            assert run.process.poll() is None and time.monotonic() < until, run.text()
            time.sleep(0.1)
        time.sleep(delay_s)
        pids = descendants(run.process.pid)
        victim = random.Random(name).choice(workers_of(run))
        os.kill(victim, how)
        took = run.wait_for(r"\[trainer rank \d\] (has died|is stopped)", END_S)
        code = run.process.wait(END_S)
        text = " ".join(run.text().split())
        wrong = [] if code == 3 else [f"exit code {code}"]
        wrong += [] if took <= NAMED_S else [f"named after {took:.1f} s"]
        wrong += [] if named(text, "trainer", how) and str(victim) in text else ["the worker is not named"]
        wrong += [] if "Last good checkpoint: global_step_" in text else ["no checkpoint is named"]
        wrong += [f"left behind: {each}" for each in left_behind(pids, run.temporary)]
        return wrong
    finally:
        finish(run)


def kill_and_go_on(folder: Path, model: Path, extra: dict[str, dict[str, Any]], *, steps: int, kills: int) -> list[str]:
    """A run on two ranks whose driver is killed and started again: what of it differs from one that was left alone."""
    straight = start(folder, model, "trainer", "straight", steps=steps, slow=False, extra=extra)
    random_times = random.Random(f"{steps} {kills}")
    try:
        assert straight.process.wait(START_S) == 0, straight.text()
    finally:
        finish(straight)
    hits = 0
    for number in range(kills + 1):
        run = start(folder, model, "trainer", "killed", steps=steps, slow=False, extra=extra)
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


def lose_a_sampler(folder: Path, model: Path, how: signal.Signals, name: str, delay_s: float) -> list[str]:
    """One trial: a sampler is hit in the middle of a run, which goes on to its end."""
    run = start(folder, model, "rollout", name, steps=SAMPLER_STEPS)
    try:
        until = time.monotonic() + START_S
        while run.steps() < 1:
            assert run.process.poll() is None and time.monotonic() < until, run.text()
            time.sleep(0.05)
        time.sleep(delay_s)
        pids = descendants(run.process.pid)
        victim = sampler_of(run)
        os.kill(victim, how)
        took = run.wait_for(r"\[rollout rank 0\] (has died|is stopped)", END_S)
        pids += descendants(run.process.pid)
        code = run.process.wait(START_S)
        wrong = [] if code == 0 else [f"exit code {code}: {run.text()[-500:]}"]
        wrong += [] if took <= NAMED_S else [f"named after {took:.1f} s"]
        wrong += [] if run.steps() == SAMPLER_STEPS else [f"{run.steps()} steps instead of {SAMPLER_STEPS}"]
        wrong += [f"left behind: {each}" for each in left_behind(pids, run.temporary)]
        return wrong
    finally:
        finish(run)


def sampler_of(run: Run) -> int:
    """The process of the sampler: the run says which worker is which, in workers/workers.json."""
    found = json.loads((run.folder / "workers" / "workers.json").read_text())
    return int(found["rollout rank 0"]["pid"])


def finish(run: Run) -> None:
    """Whatever happened, nothing of it stays."""
    pids = [run.process.pid, *descendants(run.process.pid)]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.process.wait()
    shutil.rmtree(run.temporary, ignore_errors=True)


def sweep(folder: Path, model: Path, trials: int, seed: int = 0) -> list[str]:
    """Faults of random kinds at random instants. Returns what was wrong, a line per finding."""
    chance = random.Random(seed)
    found = []
    for trial in range(trials):
        kind = chance.choice([lose_a_trainer, lose_a_sampler])
        how = chance.choice([signal.SIGKILL, signal.SIGSTOP])
        name = f"trial{trial}"
        wrong = kind(folder, model, how, name, chance.uniform(0.0, 3.0))
        found += [f"{name}, {kind.__name__}, {how.name}: {each}" for each in wrong]
    return found
