"""Deaths among many workers: of a run under Ray with light ranks (light_ranks.py), a process gets SIGKILL every --every seconds.

    python benchmarks/deaths.py [--workers 64] [--light 4] [--kills 3] [--every 20]

All ranks of a policy are needed, so the run must name the lost one, end with exit code 3 and leave nothing behind. Every kill
is a run of its own. Seconds are from the kill to the end of the run's process, and from the start to the next step.
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
import time
from pathlib import Path
from typing import Any

from controller import sections_of

START_S = 300.0  # for a run to make its first steps
END_S = 120.0  # for a run that has lost a worker to end
SETTLE_S = 10.0  # for the last processes to go


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--light", type=int, default=4, help="ranks in a process")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument(
        "--every", type=float, default=20.0, help="seconds between the first step of a run and the kill"
    )
    parser.add_argument("--samples", type=int, default=512, help="per step")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of the process of one run
    arguments = parser.parse_args()
    if arguments.folder:
        sys.exit(one_run(arguments))
    from common import print_table

    with tempfile.TemporaryDirectory() as folder:
        rows = [killed(Path(folder), number, arguments) for number in range(1, arguments.kills + 1)]
    titles = [
        "kill",
        "steps before",
        "named",
        "exit code",
        "left behind",
        "s to the end",
        "s from the start to the first step",
    ]
    print_table(titles, rows)


def one_run(arguments: argparse.Namespace) -> int:
    """Run until something stops it. Returns: the exit code."""
    sections = sections_of(
        arguments.samples,
        arguments.folder,
        argparse.Namespace(
            critic=False, steps=10**6, tokens=64, updates=2, workers=arguments.workers, samplers=0, reward="own"
        ),
    )
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
    code: int = run_guarded(lambda: train_run(config))
    return code


def killed(folder: Path, number: int, arguments: argparse.Namespace) -> list[str]:
    """A row of the table: a run that is started, and loses a process."""
    temporary = Path(tempfile.mkdtemp(prefix="ptd-"))  # short, as sockets lie in it
    command = [sys.executable, *sys.argv, "--folder", str(folder)]
    shutil.rmtree(folder / "run", ignore_errors=True)
    begun = time.monotonic()
    with open(folder / f"{number}.txt", "wb") as said:
        run = subprocess.Popen(command, stdout=said, stderr=said, env=os.environ | {"TMPDIR": str(temporary)})
    while not steps(folder):
        if run.poll() is not None or time.monotonic() - begun > START_S:
            sys.exit(f"run {number} made no step:\n{(folder / f'{number}.txt').read_text()[-2000:]}")
        time.sleep(0.1)
    started = time.monotonic() - begun
    time.sleep(arguments.every)
    workers: dict[str, dict[str, Any]] = json.loads((folder / "run" / "workers" / "workers.json").read_text())
    chosen = random.Random(number).choice(sorted(workers)[1:])
    pid = int(workers[chosen]["pid"])
    together = [name for name, each in workers.items() if each["pid"] == pid]
    made, killed_at = steps(folder), time.monotonic()
    os.kill(pid, signal.SIGKILL)
    code = run.wait(END_S)
    ended = time.monotonic() - killed_at
    text = (folder / f"{number}.txt").read_text()
    named = [name for name in together if re.search(rf"{name} \(process {pid} on .*has died", text)]
    time.sleep(SETTLE_S)
    left = [*processes_of(temporary), *map(str, temporary.iterdir())]
    return [
        str(number),
        str(made),
        named[0] if named else "no",
        str(code),
        ", ".join(left) or "nothing",
        f"{ended:.1f}",
        f"{started:.1f}",
    ]


def steps(folder: Path) -> int:
    """Steps whose metrics are written."""
    metrics = folder / "run" / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def processes_of(temporary: Path) -> list[str]:
    """Running processes that were started with this temporary folder."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if f"TMPDIR={temporary}" in (each / "environ").read_text(errors="replace"):
                found.append((each / "cmdline").read_text().replace("\0", " ")[:60])
        except OSError:
            continue  # it has ended, or belongs to someone else
    return found


if __name__ == "__main__":
    main()
