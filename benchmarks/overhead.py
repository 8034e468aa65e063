"""What it costs to watch a run: everything that is on by default, as a share of a step's time.

    python benchmarks/overhead.py [MODEL_FOLDER] [--seconds 200]     # default: the demo's model, at the demo's size
    python benchmarks/overhead.py --tiny --seconds 10                # the tiny model: that it works, not what it costs

One run, on a terminal of its own, so that the console draws its live display. Steps come in pairs on the same prompts and with
the same number of tokens, one watched and one not, in turns first and second. Two answers, which should agree:

- What watching did: the time inside everything that only watches (WATCHING), in watched steps. On the main thread the time on
  the clock, disk included, because the step waits for it; on the display's thread its CPU time, as if the step had to wait for
  all of that, too. It is a sum of small parts, so a noisy machine moves it little. The verdict is its.
- What watching changed: the paired differences of the steps' times, their median and its 95 % confidence interval from the
  order of the differences. It holds what the first cannot see (caches, the garbage collector), and all of the machine's noise.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

from step import REWARD, questions

PROMPTS, SAMPLES, TOKENS = 8, 8, 24  # of a step of the demo
AIM = 0.02  # of a step's time, at most
WARM_UP, MOST_STEPS = 2, 400  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="model folder; default: the demo's")
    parser.add_argument("--tiny", action="store_true", help="the tiny model instead")
    parser.add_argument("--seconds", type=float, default=200, help="of steps; in all it takes about 20 more")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run(arguments.model, Path(arguments.worker), arguments.seconds)
        return
    with tempfile.TemporaryDirectory() as temporary:
        path = model_of(arguments, Path(temporary))
        command = [sys.executable, __file__, path, "--worker", temporary, "--seconds", str(arguments.seconds)]
        on_terminal(command, Path(temporary) / "errors.txt")
        steps = json.loads((Path(temporary) / "steps.json").read_text())
    tell(steps[WARM_UP : WARM_UP + 2 * ((len(steps) - WARM_UP) // 2)], judge=not arguments.tiny)


def on_terminal(command: Sequence[str], errors: Path) -> None:
    """Run it with a terminal of 80 x 24 for its output, which nobody sees. Raises: SystemExit with what it said if it fails."""
    ours, theirs = pty.openpty()
    environment = dict(os.environ) | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    with errors.open("w") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=file, env=environment)
    os.close(theirs)
    try:
        while os.read(ours, 1 << 16):
            pass
    except OSError:  # the other end was closed
        pass
    if process.wait():
        raise SystemExit(errors.read_text())


def tell(steps: Sequence[dict[str, Any]], *, judge: bool) -> None:
    """Print the tables and the verdict, from steps that alternate between watched and not."""
    from common import print_rows, print_table

    on = [step for step in steps if step["watched"]]
    off = [step for step in steps if not step["watched"]]
    usual_s = median(step["wall_s"] for step in off)
    names = sorted({name for step in on for name in step["spent"]}, key=lambda name: -total(on, name))
    rows = []
    for name in names:
        spent = total(on, name) / len(on)
        calls = sum(step["spent"].get(name, [0, 0.0])[0] for step in on) / len(on)
        rows.append([name, f"{calls:.1f}", f"{1000 * spent:.2f}", f"{spent / usual_s:.2%}"])
    sums = [sum(seconds for _, seconds in step["spent"].values()) for step in on]
    rows.append(["all", "", f"{1000 * sum(sums) / len(sums):.2f}", f"{sum(sums) / len(sums) / usual_s:.2%}"])
    print_table(["watching", "calls per step", "ms per step", "of a step"], rows)
    print()
    rows = []
    for name, key in (("time", "wall_s"), ("CPU time", "cpu_s")):
        differences = sorted((one[key] - other[key]) / other[key] for one, other in zip(on, off, strict=True))
        before, now = (median(step[key] for step in each) for each in (off, on))
        rows.append([name, f"{before:.3f}", f"{now:.3f}", f"{median(differences):+.2%}", interval(differences)])
    print_rows(["per step, s", "not watched", "watched", "median difference", "95 % interval"], rows)
    share = sum(sums) / len(sums) / usual_s
    verdict = ("PASS: " if share <= AIM else "FAIL: ") if judge else ""
    print(
        f"\n{verdict}watching takes {share:.2%} of a step of {usual_s:.2f} s (of the worst: {max(sums) / usual_s:.2%}); at most "
        f"{AIM:.0%} is the aim at the demo's size; {len(on)} pairs of steps"
    )


def total(steps: Sequence[dict[str, Any]], name: str) -> float:
    return sum(step["spent"].get(name, [0, 0.0])[1] for step in steps)


def interval(values: Sequence[float]) -> str:
    """Of the median, with at least 95 % confidence: from the k-th smallest to the k-th largest, with k as large as the binomial
    distribution lets it be; fewer than 6 values have none."""
    count, outside, k = len(values), 0.0, 0
    while (outside := outside + comb(count, k) / 2**count) <= 0.025:
        k += 1
    return f"{values[k - 1]:+.2%} to {values[count - k]:+.2%}" if k else "too few pairs"


def model_of(arguments: argparse.Namespace, folder: Path) -> str:
    if arguments.tiny:
        from posttrain.models.tiny import write_tiny_model

        return str(write_tiny_model(folder / "tiny"))
    from posttrain.models.smollm2 import smollm2_135m_instruct

    return arguments.model or str(smollm2_135m_instruct())


def run(path: str, folder: Path, seconds: float) -> None:
    """A run as it is by default; every second step nobody watches. What it measured goes to folder/steps.json."""
    texts = questions(MOST_STEPS // 2)
    same = [text for start in range(0, len(texts), PROMPTS) for text in texts[start : start + PROMPTS] * 2]  # pairs
    rows = [
        {"prompt": [{"role": "user", "content": text}], "data_source": "made", "reward_model": {"ground_truth": ""}}
        for text in same
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    from posttrain.cli.process import prepare
    from posttrain.config import RunConfig

    sections: dict[str, Any] = {
        "run": {"folder": str(folder / "run"), "total_steps": MOST_STEPS},
        "model": {"path": path, "compute_dtype": "bfloat16"},
        "data": {
            "train_files": [str(folder / "train.jsonl")],
            "shuffle": False,
            "prompts_per_step": PROMPTS,
            "max_prompt_tokens": 128,
        },
        "rollout": {"samples_per_prompt": SAMPLES, "max_response_tokens": TOKENS, "ignore_eos": True},
        "reward": {"terms": [{"path": str(folder / "reward.py"), "name": "score"}]},
        "policy": {"sequences_per_micro_batch_per_device": PROMPTS * SAMPLES, "optimizer": {"lr": 1e-6}},
        "checkpoint": {"at_end": False},
    }
    config = RunConfig.model_validate(sections)
    prepare(config)
    from posttrain.build.train import train_run
    from posttrain.loops import rl_sync

    turns = Turns(seconds)
    for owner, name, instead in watching():
        setattr(owner, name, turns.watched(owner, name, instead))
    first = rl_sync.sample_groups  # what a step begins with

    def begun(*arguments: Any, **options: Any) -> Any:
        turns.next_step()
        return first(*arguments, **options)

    rl_sync.sample_groups = begun
    with suppress(Enough):
        train_run(config)
    (folder / "steps.json").write_text(json.dumps(turns.steps))


def watching() -> list[tuple[Any, str, Any]]:
    """Everything that only watches: whose it is, its name, and what it returns when it is not done."""
    from rich.live import Live

    from posttrain.loops import rl_sync
    from posttrain.run.clock import Clock
    from posttrain.run.health import Health
    from posttrain.run.timeline import Timeline
    from posttrain.run.trackers import Trackers

    return [
        (rl_sync, "write_samples", None),
        (rl_sync, "step_metrics", {}),
        (rl_sync, "longest_first", []),
        (Health, "look", []),
        (Clock, "metrics", {}),
        (Timeline, "add", None),
        (Trackers, "phase", None),
        (Trackers, "advance", None),
        (Trackers, "log", None),
        (Trackers, "message", None),
        (Live, "refresh", None),  # twice a second, in a thread of its own
    ]


class Enough(Exception):
    """The time is over."""


class Turns:
    """Switches watching off and on from step to step, and measures both."""

    def __init__(self, seconds: float) -> None:
        self.steps: list[dict[str, Any]] = []  # that have ended
        self._seconds = seconds
        self._start: tuple[float, float] | None = None  # of this step, and of the CPU's time
        self._ends = 0.0  # when there is time for no more
        self._watched = True
        self._inside = threading.local()  # what watches may call others that do
        self._spent: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])  # calls, seconds

    def next_step(self) -> None:
        """A step ends where the next begins: what is written after its own clock has stopped counts. Raises: Enough."""
        now = time.perf_counter(), time.process_time()
        if self._start:
            times = {"wall_s": now[0] - self._start[0], "cpu_s": now[1] - self._start[1]}
            self.steps.append({"watched": self._watched, "spent": self._spent, **times})
        else:
            self._ends = now[0] + self._seconds
        number = len(self.steps)
        if now[0] > self._ends and number >= WARM_UP + 2:
            self._watched = True
            raise Enough
        self._watched = (
            number + number // 2
        ) % 2 == 0  # on, off, off, on, ...: neither is always the first of its pair
        self._spent = defaultdict(lambda: [0, 0.0])
        self._start = time.perf_counter(), time.process_time()

    def watched(self, owner: Any, name: str, instead: Any) -> Callable[..., Any]:
        usual = getattr(owner, name)
        label = f"{owner.__name__.rpartition('.')[2]}.{name}"

        def call(*arguments: Any, **more: Any) -> Any:
            if not self._watched:
                return instead
            if getattr(self._inside, "now", False):
                return usual(*arguments, **more)
            main = threading.current_thread() is threading.main_thread()
            clock = time.perf_counter if main else time.thread_time
            self._inside.now, start = True, clock()
            try:
                return usual(*arguments, **more)
            finally:
                self._inside.now = False
                spent = self._spent[label]
                spent[0] += 1
                spent[1] += clock() - start

        return call


if __name__ == "__main__":
    main()
