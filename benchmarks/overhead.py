"""What it costs to watch a run: everything that is on by default against nothing, turn by turn.

    python benchmarks/overhead.py [MODEL_FOLDER] [--rounds 12]     # default: the demo's model, at the demo's size
    python benchmarks/overhead.py --tiny --rounds 3                # the tiny model: that it works, not what it costs

Two runs in processes of their own take turns, step by step. ``on`` is a run as it is by default: the console, samples with the
values of their tokens, the timeline. ``off`` writes metrics.jsonl alone, which a run cannot do without. Both sample the same
number of tokens, and both measure themselves and look after their health, as no run does without. A step is timed from the end
of one step's turn to the end of the next, so that records which are written after the step's own clock has stopped count.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from step import REWARD, Worker, questions, say

PROMPTS, SAMPLES, TOKENS = 8, 8, 24  # of a step of the demo
NAMES = ("off", "on")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="model folder; default: the demo's")
    parser.add_argument("--tiny", action="store_true", help="the tiny model instead")
    parser.add_argument("--rounds", type=int, default=12, help="steps of each run, after one that warms up")
    parser.add_argument("--preload", help="a library that every process loads first")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run(arguments.model, Path(arguments.folder), arguments.rounds + 1, watched=arguments.worker == "on")
        return
    from common import median, print_table

    with tempfile.TemporaryDirectory() as temporary:
        path = model_of(arguments, Path(temporary))
        workers = {name: Worker(name, path, Path(temporary) / name, arguments) for name in NAMES}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
        for round_number in range(arguments.rounds + 1):
            for name in NAMES if round_number % 2 else NAMES[::-1]:  # neither is always the first
                step = workers[name].turn()
                if round_number:
                    found[name].append(step)
        for worker in workers.values():
            worker.close()
    rows = []
    base = {key: median([step[key] for step in found["off"]]) for key in ("wall_s", "cpu_s")}
    for name in NAMES:
        wall, cpu = (median([step[key] for step in found[name]]) for key in ("wall_s", "cpu_s"))
        times = sorted(step["wall_s"] for step in found[name])
        rows.append(
            [
                name,
                f"{wall:.3f}",
                f"{cpu:.3f}",
                f"{wall / base['wall_s'] - 1:+.1%}",
                f"{cpu / base['cpu_s'] - 1:+.1%}",
                f"{times[0]:.3f}-{times[-1]:.3f}",
            ]
        )
    print_table(["", "s per step", "CPU s", "more time", "more CPU", "best-worst, s"], rows)


def model_of(arguments: argparse.Namespace, folder: Path) -> str:
    if arguments.tiny:
        from posttrain.models.tiny import write_tiny_model

        return str(write_tiny_model(folder / "tiny"))
    from posttrain.models.smollm2 import smollm2_135m_instruct

    return arguments.model or str(smollm2_135m_instruct())


def run(path: str, folder: Path, steps: int, *, watched: bool) -> None:
    """A run that waits for its turn after every step."""
    rows = [
        {"prompt": [{"role": "user", "content": text}], "data_source": "made", "reward_model": {"ground_truth": ""}}
        for text in questions(steps)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    from posttrain.cli.process import prepare
    from posttrain.config import RunConfig

    sections: dict[str, Any] = {
        "run": {"folder": str(folder / "run"), "total_steps": steps},
        "model": {"path": path, "compute_dtype": "bfloat16"},
        "data": {"train_files": [str(folder / "train.jsonl")], "prompts_per_step": PROMPTS, "max_prompt_tokens": 128},
        "rollout": {"samples_per_prompt": SAMPLES, "max_response_tokens": TOKENS, "ignore_eos": True},
        "reward": {"terms": [{"path": str(folder / "reward.py"), "name": "score"}]},
        "policy": {"sequences_per_micro_batch_per_device": PROMPTS * SAMPLES, "optimizer": {"lr": 1e-6}},
        "checkpoint": {"at_end": False},
        # The turns come last, so that the console's work for a step is in its time.
        "tracking": {"trackers": ["console", "turns"]}
        if watched
        else {"trackers": ["turns"], "samples_every_steps": None},
    }
    config = RunConfig.model_validate(sections)
    prepare(config)
    from posttrain import build
    from posttrain.loops import rl_sync

    usual = build.tracker
    build.tracker = lambda name, where: Turns() if name == "turns" else usual(name, where)  # type: ignore[assignment]
    if not watched:
        rl_sync.Timeline = NoTimeline  # type: ignore[misc, assignment]
    build.train_run(config)


class NoTimeline:
    def __init__(self, *_: object) -> None: ...

    def add(self, *_: object) -> None: ...


class Turns:
    """A tracker that holds the run until it is its turn, and says how long it took since then."""

    def begin(self, *_: object) -> None:
        self._wait({})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._wait({"wall_s": time.perf_counter() - self._wall, "cpu_s": time.process_time() - self._cpu})

    def _wait(self, answer: Mapping[str, float]) -> None:
        say(answer)
        sys.stdin.readline()
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def ignore(self, *_: object, **__: object) -> None:
        """phase, advance, message, close"""

    phase = advance = message = close = ignore


if __name__ == "__main__":
    main()
