"""The useful share of the time of a run that is killed again and again (ETTR, effective training time ratio): `posttrain train
--restarts` on the tiny model, whose process gets SIGKILL every --every seconds.

    python benchmarks/restarts.py [--every 60,20] [--kills 4]

Useful is what an undisturbed run would have needed for the steps that count in the end (a step that was lost and made again
counts once), at the steps per second of such a run in the same minutes: its own checkpoints are no loss. Seconds are counted from
the first step to the last kill. Every rate is a run of its own, with an undisturbed one of as many seconds as lie between
two kills before it and behind it.
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
from pathlib import Path

from step import REWARD


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", default="60,20", help="seconds between two kills")
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=20, help="steps between two checkpoints")
    arguments = parser.parse_args()
    from common import print_table

    rows = []
    for every in map(float, arguments.every.split(",")):
        with tempfile.TemporaryDirectory() as temporary:
            rows.append(measured(Path(temporary), every, arguments.kills, arguments.save_every))
    print_table(["a kill every", "kills", "seconds", "useful", "ETTR", "s from a kill to the next step"], rows)


def measured(folder: Path, every: float, kills: int, save_every: int) -> list[str]:
    """A row of the table."""
    before, _ = followed(folder / "before", every, 0, save_every)
    steps, gaps = followed(folder / "killed", every, kills, save_every)
    after, _ = followed(folder / "after", every, 0, save_every)
    rate = (before + after) / (2 * every)
    seconds = every * kills
    typical = sorted(gaps)[len(gaps) // 2] if gaps else float("nan")
    ratio = steps / (rate * seconds)
    return [f"{every:g} s", str(kills), f"{seconds:.0f}", f"{steps / rate:.0f}", f"{ratio:.2f}", f"{typical:.1f}"]


def followed(folder: Path, every: float, kills: int, save_every: int) -> tuple[int, list[float]]:
    """Follow a run from its first step.

    Returns: the steps that count until the last kill, or in ``every`` seconds without any; and the seconds from each kill but
    the last to the next step.
    """
    folder.mkdir(parents=True)
    settings = prepared(folder, save_every)
    command = [sys.executable, "-m", "posttrain", "train", *settings, f"--restarts={kills + 1}"]
    run, metrics = folder / "run", folder / "run" / "metrics.jsonl"
    gaps: list[float] = []
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as supervisor:
        began = wait_for_rows(metrics, 0.0)
        for number in range(max(kills, 1)):
            time.sleep(max(0.0, began + (number + 1) * every - time.time()))
            if kills:
                killed = time.time()
                os.kill(json.loads((run / "lock").read_text())["pid"], signal.SIGKILL)
                if number < kills - 1:
                    gaps.append(wait_for_rows(metrics, killed) - killed)
        steps = steps_in(metrics)
        supervisor.send_signal(signal.SIGTERM)
        supervisor.wait()
    return steps, gaps


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


def wait_for_rows(metrics: Path, after: float) -> float:
    """Wait for a step that is logged after a moment. Returns: the time at which it was."""
    while not metrics.exists() or metrics.stat().st_mtime <= after or not steps_in(metrics):
        time.sleep(0.02)
    return metrics.stat().st_mtime


def steps_in(metrics: Path) -> int:
    """The steps on record; the last line may be half written."""
    return metrics.read_text().count("\n")


if __name__ == "__main__":
    main()
