"""A trainer and two samplers of their own under Ray: how long it waits for them, and what a sampler killed every minute costs.

    python benchmarks/async_separate.py [--steps 180] [--update-s 1.0] [--kill-every-s 60] [--rounds 1]

The tiny model samples and trains; every update sleeps besides, as if the trainer's device were slower than its samplers.
These are then fast enough, and a trainer that waits waits for what is between them. Two runs take turns with the same prompts:
one is left alone, of the other a sampler is killed (SIGKILL) every so many seconds, now the one and now the other. Both count
from their fifth step on. All groups that schedule.jsonl says were consumed are counted: each is to be trained once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPTS, SAMPLES = 8, 4
WARM = 5  # steps that are not counted: processes start


@dataclass(frozen=True)
class Found:
    """A run, from its step WARM on."""

    samples_per_hour: float
    step_s: float
    waited: float  # share of the step
    stale: float  # largest of any step
    lost: int  # samplers
    once: bool  # every group that was consumed was consumed once, and none is missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=180)
    parser.add_argument("--update-s", type=float, default=1.0, help="every update sleeps so long besides")
    parser.add_argument("--kill-every-s", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    from common import print_table

    from posttrain.models.tiny import write_tiny_model

    found: dict[bool, list[Found]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_tiny_model(place / "tiny")
        for number in range(arguments.rounds):
            for killed in (False, True) if number % 2 == 0 else (True, False):
                where = place / f"{number}_{'killed' if killed else 'alone'}"
                found[killed].append(run(where, arguments, arguments.kill_every_s if killed else None))
    alone = statistics.median(each.samples_per_hour for each in found[False])
    rows = []
    for killed, runs in found.items():
        middle = sorted(runs, key=lambda each: each.samples_per_hour)[len(runs) // 2]
        name = f"killed every {arguments.kill_every_s:g} s" if killed else "left alone"
        rows.append(
            [
                name,
                f"{middle.step_s:.2f}",
                f"{middle.samples_per_hour:,.0f}",
                f"{100 * middle.samples_per_hour / alone:.0f} %",
                f"{100 * middle.waited:.1f} %",
                f"{middle.stale:.0f}",
                "/".join(str(each.lost) for each in runs),
                "yes" if all(each.once for each in runs) else "NO",
            ]
        )
    header = ["samplers", "step, s", "samples/h", "of it", "trainer waited", "most stale", "lost", "each group once"]
    print_table(header, rows)


def run(folder: Path, given: argparse.Namespace, kill_every_s: float | None) -> Found:
    from posttrain.build.train import train_run

    config = settings(folder, given.steps)
    over = threading.Event()
    killer = threading.Thread(target=kill_by_turns, args=(folder, kill_every_s, over))
    if kill_every_s:
        killer.start()
    try:
        with slow_updates(given.update_s):
            train_run(config)
    finally:
        over.set()
        if kill_every_s:
            killer.join()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (folder / "schedule.jsonl").read_text().splitlines()]
    kept = lines[WARM:]
    step_s = statistics.mean(line["time/step_s"] for line in kept)
    consumed = Counter(event["group"] for event in events if event["event"] == "consumed")
    return Found(
        samples_per_hour=3600 * PROMPTS * SAMPLES / step_s,
        step_s=step_s,
        waited=statistics.mean(line["time/trainer_waited_share"] for line in kept),
        stale=max(line["async/staleness_steps_max"] for line in lines),
        lost=sum(event["event"] == "lost" for event in events),
        once=len(consumed) == PROMPTS * given.steps and set(consumed.values()) == {1},
    )


def settings(folder: Path, steps: int) -> Any:
    from posttrain.config import RunConfig

    folder.mkdir(parents=True)
    rows = [{"prompt": f"{number} and {number}", "answer": "1"} for number in range(8 * PROMPTS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunConfig.model_validate(
        {
            "model": {"path": str(folder.parent / "tiny"), "compute_dtype": "float32"},
            "run": {"folder": str(folder), "total_steps": steps},
            "data": {"train_files": [str(folder / "rows.jsonl")], "prompts_per_step": PROMPTS},
            "reward": {"terms": [{"name": "length", "options": {"max_characters": 40, "ramp_characters": 40}}]},
            "rollout": {"devices": [1, 2], "samples_per_prompt": SAMPLES, "max_response_tokens": 32},
            "policy": {
                "devices": [0],
                "sequences_per_mini_batch": PROMPTS * SAMPLES,
                "sequences_per_micro_batch_per_device": PROMPTS * SAMPLES,
            },
            "loss": {"rollout_correction": {"weights": "token"}},
            "asynchronous": {"mode": "separate", "max_staleness_steps": 2},
            "placement": {"device": "cpu", "devices": 3, "runtime": "ray", "cpu_threads": 1},
            "validation": {"before_training": False, "after_training": False},
            "checkpoint": {"at_end": False},
            "tracking": {"trackers": []},
        }
    )


class slow_updates:  # noqa: N801  # read as a statement
    """Every update sleeps so many seconds besides."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def __enter__(self) -> None:
        from posttrain.steps import rl_step

        self.saved = update = rl_step.update_models

        def slow(*given: Any) -> Any:
            time.sleep(self.seconds)
            return update(*given)

        rl_step.update_models = slow  # type: ignore[assignment]

    def __exit__(self, *exception: object) -> None:
        from posttrain.steps import rl_step

        rl_step.update_models = self.saved


def kill_by_turns(folder: Path, every_s: float | None, over: threading.Event) -> None:
    """Kill a sampler every so many seconds after step WARM, the one and the other in turns."""
    metrics, workers = folder / "metrics.jsonl", folder / "workers/workers.json"
    while not over.wait(0.2) and not (metrics.exists() and metrics.read_text().count("\n") >= WARM):
        pass
    turn = 0
    while not over.wait(every_s):
        with suppress(ProcessLookupError, KeyError):
            os.kill(json.loads(workers.read_text())[f"rollout rank {turn % 2}"]["pid"], signal.SIGKILL)
        turn += 1


if __name__ == "__main__":
    main()
