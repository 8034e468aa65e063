"""The useful share of the time of a run that is killed again and again (ETTR, effective training time ratio): `posttrain train
--restarts` on the tiny model, whose process gets SIGKILL every --every seconds.

    python benchmarks/restarts.py [--every 60,20] [--kills 4] [--save-every 5] [--clock cpu]

Useful is what an undisturbed run would have needed for the steps that count in the end (a step that was lost and made again
counts once), at the steps per second of such a run in the same minutes: its own checkpoints are no loss. Seconds are counted from
the first step to the last kill. Every rate is a run of its own, with an undisturbed one of as many seconds as lie between
two kills before it and behind it. With --clock cpu all seconds are CPU seconds of all processes of the command, for a machine
with other work: waiting is no part of them. On such a machine, the share by the killed run's own clock says more:
seconds of the steps that count and of their checkpoints (timeline.jsonl), divided by all seconds. The parts of the rest are
seconds from a kill to the end of the next step, less a step, and steps made twice. The CPU seconds of a start are of the run's
processes, up to the end of its first step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from common import median
from controller import cpu_of
from step import REWARD

from posttrain.processes import proc


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", default="60,20", help="seconds between two kills")
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=5, help="steps between two checkpoints")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    arguments = parser.parse_args()
    from common import print_table

    rows = []
    for every in map(float, arguments.every.split(",")):
        with tempfile.TemporaryDirectory() as temporary:
            rows.append(measured(Path(temporary), every, arguments))
    titles = ["a kill every", "kills", "seconds", "useful", "ETTR", "by its own clock", "starts, s", "made twice, s"]
    print_table([*titles, "s of a step", "s from a kill to the next step", "CPU s of a start"], rows)


@dataclass
class Followed:
    """A run that was followed from its first step to the last kill, or for the seconds between two without any."""

    steps: int = 0  # that count
    own_s: float = 0.0  # of them and their checkpoints
    gaps: list[float] = field(default_factory=list)  # seconds from each kill but the last to the end of the next step
    twice: list[int] = field(default_factory=list)  # steps made again after each
    cpu_s: list[float] = field(default_factory=list)  # of each start


class Clock:
    """Seconds, or CPU seconds of a process and of all that it has started, also of those that have ended."""

    def __init__(self, process: int, kind: str):
        self._process, self._kind = process, kind
        self._used: dict[int, float] = {}

    def now(self) -> float:
        if self._kind == "wall":
            return time.time()
        for pid in (self._process, *proc.descendants(self._process)):
            with suppress(OSError, ValueError):
                self._used[pid] = cpu_of(pid)
        return sum(self._used.values())

    def wait_until(self, moment: float) -> None:
        while self.now() < moment:
            time.sleep(0.02)


def measured(folder: Path, every: float, arguments: argparse.Namespace) -> list[str]:
    """A row of the table."""
    kills, how = arguments.kills, (every, arguments.save_every, arguments.clock)
    before = followed(folder / "before", 0, *how)
    found = followed(folder / "killed", kills, *how)
    after = followed(folder / "after", 0, *how)
    rate = (before.steps + after.steps) / (2 * every)
    seconds = every * kills
    step_s = found.own_s / max(found.steps, 1) if arguments.clock == "wall" else 1 / rate
    return [
        f"{every:g} s",
        str(kills),
        f"{seconds:.0f}",
        f"{found.steps / rate:.0f}",
        f"{found.steps / (rate * seconds):.2f}",
        f"{found.own_s / seconds:.2f}" if arguments.clock == "wall" else "",
        f"{sum(found.gaps) - step_s * len(found.gaps):.1f}",
        f"{sum(found.twice) * step_s:.1f}",
        f"{step_s:.2f}",
        f"{median(found.gaps):.1f}" if found.gaps else "",
        f"{median(found.cpu_s):.1f}" if found.cpu_s else "",
    ]


def followed(folder: Path, kills: int, every: float, save_every: int, kind: str) -> Followed:
    """Follow a run; without kills it has no supervisor."""
    folder.mkdir(parents=True)
    settings = prepared(folder, save_every)
    restarts = [f"--restarts={kills + 1}"] if kills else []
    command = [sys.executable, "-m", "posttrain", "train", *settings, *restarts]
    run, metrics = folder / "run", folder / "run" / "metrics.jsonl"
    found = Followed()
    supervisor = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        clock = Clock(supervisor.pid, kind)
        wait_for_step(metrics, clock)
        began = clock.now()
        for number in range(max(kills, 1)):
            clock.wait_until(began + (number + 1) * every)
            if kills:
                used = {pid: cpu_of(pid) for pid in proc.descendants(supervisor.pid)}
                made, file, killed = steps_in(metrics), metrics.stat().st_ino, clock.now()
                os.kill(trainer(run), signal.SIGKILL)
                if number < kills - 1:
                    kept = wait_for_step(metrics, clock, file)
                    found.gaps.append(clock.now() - killed)
                    found.twice.append(made - kept)
                    now = [trainer(run), *proc.descendants(trainer(run))]
                    found.cpu_s.append(sum(cpu_of(pid) - used.get(pid, 0.0) for pid in now))
        found.steps = steps_in(metrics)
        found.own_s = own_seconds(run)
    finally:  # also where this benchmark is interrupted
        supervisor.send_signal(signal.SIGTERM)
        supervisor.wait()
    return found


def trainer(run: Path) -> int:
    """The process of a run."""
    return int(json.loads((run / "lock").read_text())["pid"])


def own_seconds(run: Path) -> float:
    """Seconds of the steps on record but for the first, which comes before all counting, and of their checkpoints."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines(keepends=True)[1:]]
    phases = [json.loads(line) for line in (run / "timeline.jsonl").read_text().splitlines(keepends=True)]
    saved = (each["end_s"] - each["start_s"] for each in phases if each["phase"] == "checkpoint")
    return sum(step["time/step_s"] for step in steps) + sum(saved)


def prepared(folder: Path, save_every: int) -> list[str]:
    """The command line's settings, with the files that they name."""
    from posttrain.models.tiny import write_tiny_model

    model = write_tiny_model(folder / "tiny")
    (folder / "reward.py").write_text(REWARD)
    rows = [{"data_source": "sums", "prompt": f"{n}+{n}=", "reward_model": {"ground_truth": "x"}} for n in range(64)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"run.folder={folder / 'run'}",
        "run.total_steps=1000000",
        f"model.path={model}",
        "model.compute_dtype=float32",
        f"data.train_files=[{folder / 'train.jsonl'}]",
        "data.prompts_per_step=8",
        "rollout.samples_per_prompt=8",
        "rollout.max_response_tokens=32",
        f"reward.terms=[{{name: score, path: {folder / 'reward.py'}}}]",
        "policy.sequences_per_micro_batch_per_device=16",
        f"checkpoint.every_steps={save_every}",
        "tracking.trackers=[]",
    ]


def wait_for_step(metrics: Path, clock: Clock, before: int = 0) -> int:
    """Wait for the first step that a run logs.

    A run that resumes writes a new file of the steps that it keeps, and adds to it.

    Args: ``before``, the inode of the file that it replaces.
    Returns: the steps that were kept.
    """
    kept = None
    while True:
        if metrics.exists() and metrics.stat().st_ino != before:
            rows = steps_in(metrics)
            kept = rows if kept is None else kept
            if rows > kept:
                return kept
        clock.now()
        time.sleep(0.01)


def steps_in(metrics: Path) -> int:
    """The steps on record; the last line may be half written."""
    return metrics.read_text().count("\n")


if __name__ == "__main__":
    main()
