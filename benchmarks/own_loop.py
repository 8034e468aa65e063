"""GRPO as a loop of one's own (examples/own_loop.py) next to ``posttrain train``: the same configuration, the same metrics.

    python benchmarks/own_loop.py [MODEL_FOLDER] [--rounds 3] [--steps 6]      # default: the demo's model
    python benchmarks/own_loop.py --tiny --steps 40                            # the tiny model: what Python itself costs

Each run has a process of its own, the two in turns. CPU seconds of all threads: of a step, the median of the steps after the
first; of the whole process, start and end included, where the loop also writes its model for transformers. The metrics of the
two must be equal, or the comparison fails.
"""

from __future__ import annotations

import argparse
import json
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from step import PROMPTS, REWARD, SAMPLES, questions

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_loop.py"
TOKENS = 24  # of a response of the demo
TIMED = ("time/", "speed/", "memory/")
NAMES = {"train": "posttrain train", "loop": "examples/own_loop.py"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="model folder; default: the demo's")
    parser.add_argument("--tiny", action="store_true", help="the tiny model instead")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--worker", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, arguments.folder, Path(arguments.model))
        return
    from common import median, print_table

    found: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
    with tempfile.TemporaryDirectory() as temporary:
        file = write_run(Path(temporary), model_of(arguments, Path(temporary)), arguments.steps)
        for number in range(arguments.rounds):
            for name in sorted(NAMES, reverse=number % 2 == 0):  # each is first in turn
                found[name].append(one_run(name, file, Path(temporary) / f"{name}_{number}"))
    if len({json.dumps(run["metrics"]) for runs in found.values() for run in runs}) > 1:
        raise SystemExit("the metrics of the runs differ")
    rows = []
    for name, runs in found.items():
        of_step = [median(run["step_cpu_s"][1:]) for run in runs]
        whole = [run["cpu_s"] for run in runs]
        wall = [median(run["step_s"][1:]) for run in runs]
        first = median([median(run["step_cpu_s"][1:]) for run in found["train"]])
        spread = f"{min(of_step):.4f}-{max(of_step):.4f}"
        share = f"{median(of_step) / first:.3f}x"
        rows.append(
            [NAMES[name], f"{median(of_step):.4f}", spread, share, f"{median(wall):.4f}", f"{median(whole):.2f}"]
        )
    print_table(["", "CPU s per step", "best-worst", "of train's", "s per step", "CPU s of the process"], rows)
    print(f"\nmetrics of all {arguments.steps} steps are equal; {arguments.rounds} rounds")


def model_of(arguments: argparse.Namespace, folder: Path) -> str:
    if arguments.tiny:
        from posttrain.models.tiny import write_tiny_model

        return str(write_tiny_model(folder / "tiny"))
    from posttrain.models.smollm2 import smollm2_135m_instruct

    return arguments.model or str(smollm2_135m_instruct())


def write_run(folder: Path, model: str, steps: int) -> Path:
    """Write a run of the demo's size, with its data and its reward. Returns: the configuration."""
    rows = [{"prompt": text, "data_source": "made", "ground_truth": ""} for text in questions(steps)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    sections: dict[str, Any] = {
        "run": {"seed": 1, "total_steps": steps},
        "model": {"path": model, "compute_dtype": "bfloat16"},
        "data": {"train_files": [str(folder / "train.jsonl")], "prompts_per_step": PROMPTS, "max_prompt_tokens": 128},
        "rollout": {"samples_per_prompt": SAMPLES, "max_response_tokens": TOKENS},
        "reward": {"workers": 1, "terms": [{"path": str(folder / "reward.py"), "name": "score"}]},
        "policy": {"sequences_per_micro_batch_per_device": PROMPTS * SAMPLES, "optimizer": {"lr": 1e-5}},
        "checkpoint": {"at_end": False},
        "placement": {"device": "cpu"},
    }
    (folder / "run.yaml").write_text(json.dumps(sections))
    return folder / "run.yaml"


def one_run(name: str, file: Path, folder: Path) -> dict[str, Any]:
    """Make one run in a process of its own. Returns: its CPU seconds and metrics. Raises: SystemExit if it fails."""
    command = [sys.executable, __file__, str(file), "--worker", name, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    found: dict[str, Any] = json.loads((folder / "measured.json").read_text())
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    found["step_s"] = [row["time/step_s"] for row in metrics]
    found["metrics"] = [{name: value for name, value in row.items() if not name.startswith(TIMED)} for row in metrics]
    return found


def work(name: str, folder: Path, file: Path) -> None:
    """Run it as its user would, and note the process's CPU time whenever a step was recorded."""
    from posttrain.run.trackers import Trackers

    usual, stamps = Trackers.log, [0.0]

    def log(trackers: Trackers, step: int, metrics: Mapping[str, float]) -> None:
        usual(trackers, step, metrics)
        stamps.append(time.process_time())

    Trackers.log = log  # type: ignore[method-assign]
    overrides = [f"run.folder={folder}"]
    if name == "loop":
        sys.argv = [str(EXAMPLE), str(file), *overrides]
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    else:
        from posttrain.cli.app import main as posttrain

        sys.argv = ["posttrain", "train", str(file), *overrides]
        try:
            posttrain()
        except SystemExit as ended:
            if ended.code:
                raise
    taken = [after - before for before, after in pairwise(stamps)]
    (folder / "measured.json").write_text(json.dumps({"step_cpu_s": taken, "cpu_s": time.process_time()}))


if __name__ == "__main__":
    main()
