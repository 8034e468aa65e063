"""The useful share of the time of a run that is killed again and again (ETTR, effective training time ratio): `posttrain train
--restarts` on the tiny model, whose process gets SIGKILL every --every seconds.

    python benchmarks/restarts.py [--every 60,20] [--kills 4] [--save-every 5]

Useful is what an undisturbed run would have needed for the steps that count in the end (a step that was lost and made again
counts once), at the steps per second of such a run in the same minutes: its own checkpoints are no loss. Seconds are counted from
the first step to the last kill. Every rate is a run of its own, with an undisturbed one of as many seconds as lie between
two kills before it and behind it. On a machine whose other work changes, the share by the killed run's own clock says more:
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
from dataclasses import dataclass, field
from pathlib import Path

from common import median
from controller import cpu_of
from step import REWARD

from posttrain.processes import proc


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", default="60,20", help="seconds between two kills")
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=5, help="steps between two checkpoints")
    arguments = parser.parse_args()
    from common import print_table

    rows = []
    for every in map(float, arguments.every.split(",")):
        with tempfile.TemporaryDirectory() as temporary:
            rows.append(measured(Path(temporary), every, arguments.kills, arguments.save_every))
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


def measured(folder: Path, every: float, kills: int, save_every: int) -> list[str]:
    """A row of the table."""
    before = followed(folder / "before", every, 0, save_every)
    found = followed(folder / "killed", every, kills, save_every)
    after = followed(folder / "after", every, 0, save_every)
    rate = (before.steps + after.steps) / (2 * every)
    seconds = every * kills
    step_s = found.own_s / max(found.steps, 1)
    return [
        f"{every:g} s",
        str(kills),
        f"{seconds:.0f}",
        f"{found.steps / rate:.0f}",
        f"{found.steps / (rate * seconds):.2f}",
        f"{found.own_s / seconds:.2f}",
        f"{sum(found.gaps) - step_s * len(found.gaps):.1f}",
        f"{sum(found.twice) * step_s:.1f}",
        f"{step_s:.2f}",
        f"{median(found.gaps):.1f}" if found.gaps else "",
        f"{median(found.cpu_s):.1f}" if found.cpu_s else "",
    ]


def followed(folder: Path, every: float, kills: int, save_every: int) -> Followed:
    """Follow a run."""
    folder.mkdir(parents=True)
    settings = prepared(folder, save_every)
    command = [sys.executable, "-m", "posttrain", "train", *settings, f"--restarts={kills + 1}"]
    run, metrics = folder / "run", folder / "run" / "metrics.jsonl"
    found = Followed()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as supervisor:
        began, _ = wait_for_step(metrics)
        for number in range(max(kills, 1)):
            time.sleep(max(0.0, began + (number + 1) * every - time.time()))
            if kills:
                used = {pid: cpu_of(pid) for pid in proc.descendants(supervisor.pid)}
                made, file, killed = steps_in(metrics), metrics.stat().st_ino, time.time()
                os.kill(trainer(run), signal.SIGKILL)
                if number < kills - 1:
                    again, kept = wait_for_step(metrics, file)
                    found.gaps.append(again - killed)
                    found.twice.append(made - kept)
                    now = [trainer(run), *proc.descendants(trainer(run))]
                    found.cpu_s.append(sum(cpu_of(pid) - used.get(pid, 0.0) for pid in now))
        found.steps = steps_in(metrics)
        found.own_s = own_seconds(run)
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


def wait_for_step(metrics: Path, before: int = 0) -> tuple[float, int]:
    """Wait for the first step that a run logs.

    A run that resumes writes a new file of the steps that it keeps, and adds to it.

    Args: ``before``, the inode of the file that it replaces.
    Returns: the time at which the step was logged, and the steps that were kept.
    """
    kept = None
    while True:
        if metrics.exists() and metrics.stat().st_ino != before:
            rows = steps_in(metrics)
            kept = rows if kept is None else kept
            if rows > kept:
                return metrics.stat().st_mtime, kept
        time.sleep(0.01)


def steps_in(metrics: Path) -> int:
    """The steps on record; the last line may be half written."""
    return metrics.read_text().count("\n")


if __name__ == "__main__":
    main()
