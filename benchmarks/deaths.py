"""Deaths among many workers: of a run under Ray with light ranks (light_ranks.py), a process gets SIGKILL every --every seconds.

    python benchmarks/deaths.py [--workers 64] [--light 4] [--kills 3] [--every 20]
    python benchmarks/deaths.py --workers 1 --samplers 64 [--light 1] [--kills 6] [--every 20]

All ranks of a policy are needed, so the run must name the lost one, end with exit code 3 and leave nothing behind. Every kill
is a run of its own. Seconds are from the kill to the end of the run's process, and from the start to the next step.

With --samplers, these have devices of their own, and sample while a step trains (asynchronous.mode: separate). Each kill is of
the same run, which must name the samplers of the process, give their requests to others and start them again. Seconds are from
the kill to the name, and until all that were lost have joined. After --every seconds without one, the run gets SIGTERM, or
where there are several ranks, the last of them SIGKILL. It must have trained every group that it admitted once, with all
samples, and leave nothing behind. What the driver holds is counted as the first sampler dies and at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from controller import GROUP, sections_of
from held import Held

START_S = 300.0  # for a run to make its first steps
END_S = 120.0  # for a run that has lost a worker to end, and for a sampler to join
SETTLE_S = 10.0  # for the last processes to go
HELD_S = 3.0  # between two counts of what the driver holds
CACHE = "torchinductor_"  # of torch, for the next process
SETTLED = 3  # steps before the first kill of a sampler
STALENESS = 2  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--samplers", type=int, default=0, help="on devices of their own")
    parser.add_argument("--light", type=int, default=4, help="ranks in a process")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument(
        "--every", type=float, default=20.0, help="seconds between the first step of a run and the kill"
    )
    parser.add_argument("--samples", type=int, default=512, help="per step")
    parser.add_argument("--tokens", type=int, default=64, help="of the longest response")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of the process of one run
    arguments = parser.parse_args()
    if arguments.folder:
        sys.exit(one_run(arguments))
    with tempfile.TemporaryDirectory() as folder:
        if arguments.samplers:
            tell_samplers(Path(folder), arguments)
        else:
            tell_ranks(Path(folder), arguments)


def one_run(arguments: argparse.Namespace) -> int:
    """Run until something stops it. Returns: the exit code."""
    given = {"critic": False, "kl": False, "steps": 10**6, "updates": 1 if arguments.samplers else 2, "reward": "own"}
    sections = sections_of(arguments.samples, arguments.folder, argparse.Namespace(**vars(arguments) | given))
    if arguments.samplers:
        sections["asynchronous"] = {"mode": "separate", "max_staleness_steps": STALENESS}
        sections["loss"] = {"rollout_correction": {"weights": "token"}}
    from posttrain.cli.errors import run_guarded
    from posttrain.cli.process import prepare
    from posttrain.config import RunConfig
    from posttrain.registry import plug_in

    plug_in(["null_engines"])
    config = RunConfig.model_validate(sections)
    prepare(config)
    from light_ranks import use_light_ranks

    from posttrain.build.train import train_run

    use_light_ranks(arguments.light)
    if arguments.samplers:
        threading.Thread(target=note_held, args=(arguments.folder,), daemon=True).start()
    code: int = run_guarded(lambda: train_run(config))
    return code


def note_held(folder: Path) -> None:
    """Write what this process holds into a file, every few seconds from the first step on."""
    path, metrics = folder / "held.jsonl", folder / "run" / "metrics.jsonl"
    while True:
        time.sleep(HELD_S)
        if not metrics.exists():
            continue
        with open(path, "a") as file:
            file.write(json.dumps(Held.now()._asdict()) + "\n")


class Run:
    """A run in a process of its own. Raises: SystemExit where it makes no step."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.said = folder / "run", folder / f"{name}.txt"
        self.temporary = Path(tempfile.mkdtemp(prefix="ptd-"))  # short, as sockets lie in it
        command = [sys.executable, *sys.argv, "--folder", str(folder)]
        shutil.rmtree(self.folder, ignore_errors=True)
        begun = time.monotonic()
        with open(self.said, "wb") as said:
            environment = os.environ | {"TMPDIR": str(self.temporary)}
            self.process = subprocess.Popen(command, stdout=said, stderr=said, env=environment)
        self.wait_for(lambda: self.steps() > 0, START_S, "a step")
        self.start_s = time.monotonic() - begun

    def wait_for(self, so: Callable[[], bool], timeout_s: float, what: str) -> float:
        """Seconds until something is so. Raises: SystemExit where the run has ended before, or it is too late."""
        begun = time.monotonic()
        while not so():
            if self.process.poll() is not None or time.monotonic() - begun > timeout_s:
                sys.exit(f"{what} did not come (exit code {self.process.poll()}):\n{self.text()[-2000:]}")
            time.sleep(0.05)
        return time.monotonic() - begun

    def text(self) -> str:
        return self.said.read_text()

    def steps(self) -> int:
        """Steps whose metrics are written."""
        metrics = self.folder / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def workers(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = json.loads((self.folder / "workers" / "workers.json").read_text())
        return found

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events of this kind in schedule.jsonl; its last line may be half written."""
        lines = (self.folder / "schedule.jsonl").read_text().splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [each for each in found if each["event"] == kind]

    def left(self) -> list[str]:
        """Processes and files of it that are still there after its end."""
        until = time.monotonic() + SETTLE_S
        while True:
            files = [str(each) for each in self.temporary.iterdir() if not each.name.startswith(CACHE)]
            found = [*processes_of(self.temporary), *files]
            if not found or time.monotonic() > until:
                break
            time.sleep(0.2)
        shutil.rmtree(self.temporary, ignore_errors=True)
        return found


def tell_ranks(folder: Path, arguments: argparse.Namespace) -> None:
    from common import print_table

    rows = [killed_rank(folder, number, arguments) for number in range(1, arguments.kills + 1)]
    titles = ["kill", "steps before", "named", "exit code", "left behind", "s to the end"]
    print_table([*titles, "s from the start to the first step"], rows)


def killed_rank(folder: Path, number: int, arguments: argparse.Namespace) -> list[str]:
    """A row of the table: a run that is started, and loses a process."""
    run = Run(folder, str(number))
    time.sleep(arguments.every)
    workers = run.workers()
    pid = int(workers[random.Random(number).choice(sorted(workers)[1:])]["pid"])
    made, killed_at = run.steps(), time.monotonic()
    os.kill(pid, signal.SIGKILL)
    code = run.process.wait(END_S)
    ended = time.monotonic() - killed_at
    named = named_of(run.text(), [name for name, each in workers.items() if each["pid"] == pid], pid)
    return [
        str(number),
        str(made),
        named[0] if named else "no",
        str(code),
        ", ".join(run.left()) or "nothing",
        f"{ended:.1f}",
        f"{run.start_s:.1f}",
    ]


def tell_samplers(folder: Path, arguments: argparse.Namespace) -> None:
    from common import print_table

    run = Run(folder, "samplers")
    held = folder / "held.jsonl"
    run.wait_for(lambda: run.steps() >= SETTLED and held.exists() and "\n" in held.read_text(), START_S, "more steps")
    rows, next_at = [], time.monotonic()
    before, begun = held_in(folder), run.steps()
    for number in range(1, arguments.kills + 1):
        next_at += arguments.every
        time.sleep(max(next_at - time.monotonic(), 0.0))
        rows.append(killed_sampler(run, number))
    time.sleep(arguments.every)
    after, steps = held_in(folder), run.steps()
    ranks = {name: each["pid"] for name, each in run.workers().items() if not name.startswith("rollout")}
    last = sorted(ranks)[-1]
    if len(ranks) > 1:
        os.kill(ranks[last], signal.SIGKILL)
    else:
        run.process.send_signal(signal.SIGTERM)
    code = run.process.wait(END_S)
    end = "SIGTERM"
    if len(ranks) > 1:
        end = f"the death of {last}, " + ("named" if named_of(run.text(), [last], ranks[last]) else "NOT NAMED")
    titles = ["kill", "step", "lost", "named", "s to the name", "s until all have joined", "samplers then"]
    print_table(titles, rows)
    lost, joined = len(run.events("lost")), len(run.events("joined"))
    rows = [
        ["steps", str(steps)],
        [f"exit code after {end}", str(code)],
        ["samplers lost, joined", f"{lost}, {joined}"],
        ["groups trained once, with all samples", trained_once(run)],
        ["left behind", ", ".join(run.left()) or "nothing"],
        [
            "CPU of the driver, µs a sample",
            f"{1e6 * (after.cpu_s - before.cpu_s) / (steps - begun) / arguments.samples:,.0f}",
        ],
        *([name, f"{old:,.0f} to {new:,.0f}"] for name, old, new in zip(Held.TITLES, before, after, strict=True)),
    ]
    print_table([f"{arguments.samplers} samplers, {arguments.workers} ranks", ""], rows)


def killed_sampler(run: Run, number: int) -> list[str]:
    """A row of the table: samplers of one process are lost and replaced."""
    workers = {name: each for name, each in run.workers().items() if name.startswith("rollout")}
    pid = int(workers[random.Random(number).choice(sorted(workers))]["pid"])
    together = [name for name, each in workers.items() if each["pid"] == pid]
    step, lost, joined = run.steps(), len(run.events("lost")), len(run.events("joined"))
    os.kill(pid, signal.SIGKILL)
    named_s = run.wait_for(lambda: len(named_of(run.text(), together, pid)) == len(together), END_S, "a name")
    joined_s = named_s + run.wait_for(
        lambda: len(run.events("lost")) >= lost + len(together) and len(run.events("joined")) >= joined + len(together),
        END_S,
        "a sampler in the place of each",
    )
    names = named_of(run.text(), together, pid)
    here = len(run.events("joined")) - len(run.events("lost"))
    return [
        str(number),
        str(step),
        str(len(together)),
        names[0],
        f"{named_s:.1f}",
        f"{joined_s:.1f}",
        str(here),
    ]


def named_of(text: str, names: list[str], pid: int) -> list[str]:
    """Those that the run has named as dead, with their process."""
    said = " ".join(text.split())
    return [name for name in names if re.search(rf"{name} \(process {pid} on \S+\) has died", said)]


def trained_once(run: Run) -> str:
    """ "yes", or what is wrong with the groups of a run."""
    consumed = Counter(each["group"] for each in run.events("consumed"))
    gone = consumed + Counter(each["group"] for kind in ("dropped", "filtered") for each in run.events(kind))
    admitted = {each["group"] for each in run.events("admitted")}
    wrong = [f"group {group} {count} times" for group, count in gone.items() if count > 1 or group not in admitted]
    # The oldest of those that are under way at the end
    ahead = sorted(admitted - gone.keys())
    by_step = Counter(each["step"] for each in run.events("consumed"))
    most = (STALENESS + 1) * max(by_step.values())
    wrong += [f"{len(ahead)} groups are ahead, not {most}"] if len(ahead) > most else []
    for step, groups in by_step.items():
        path = run.folder / f"samples/step_{step}.jsonl"
        if not path.exists():
            continue  # the step was left
        names = Counter(json.loads(line)["sample_id"] for line in path.read_text().splitlines())
        if names.total() != GROUP * groups:
            wrong.append(f"step {step} has {names.total()} samples of {groups} groups")
    return "; ".join(wrong) or "yes"


def held_in(folder: Path) -> Held:
    """What the driver held last."""
    whole = [line for line in (folder / "held.jsonl").read_text().splitlines(keepends=True) if line.endswith("\n")]
    return Held(**json.loads(whole[-1]))


def processes_of(temporary: Path) -> list[str]:
    """Running processes that were started with this temporary folder."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to someone else
            if f"TMPDIR={temporary}" in (each / "environ").read_text(errors="replace"):
                found.append((each / "cmdline").read_text().replace("\0", " ")[:60])
    return found


if __name__ == "__main__":
    main()
