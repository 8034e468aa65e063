"""Learning with stale data: a task, synchronous and with responses up to S steps older, three seeds each.

    python benchmarks/async_learning.py FOLDER [--task demo|digits|number] [--steps 40] [--staleness 0,1,4] [--seeds 1,2,3]
    python benchmarks/async_learning.py FOLDER --table

--task demo is that of `posttrain demo` (SmolLM2-135M; hours for all nine runs on a few cores). --task digits takes a minute a
run: a random model of two layers learns to begin its answers with a digit, asked for other numbers than those it trains on.
--task number wants six digits and has a quarter of the learning rate, so it takes longer. All runs see equally many samples, with
the same correction of the loss; only S differs (0: mode off). A finished run is not repeated, so the command can be given piece
by piece. --table trains nothing and prints held-out accuracy by step: the mean of the seeds, the smallest and the largest.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from importlib.resources import as_file, files
from pathlib import Path

from common import print_table

from posttrain.config import RunConfig
from posttrain.dialects import native
from posttrain.report.read import read_run

ACCURACY = "validation/accuracy"
STALE = "async/staleness_steps_mean"
REWARDS = {
    "digits": """
def score(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str[:1].isdigit())
""",
    "number": """
def score(data_source, solution_str, ground_truth, extra_info):
    return sum(each in "0123456789" for each in solution_str[:6]) / 6
""",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="data and runs are written into it")
    parser.add_argument("--task", choices=["demo", *REWARDS], default="demo")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--staleness", default="0,1,4")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    bounds = [int(each) for each in arguments.staleness.split(",")]
    seeds = [int(each) for each in arguments.seeds.split(",")]
    if not arguments.table:
        for seed in seeds:
            for bound in bounds:
                train(arguments.task, arguments.folder, seed, bound, arguments.steps)
    print_table(["S", "mean staleness", *titles(arguments.steps), "seeds"], table(arguments.folder, bounds, seeds))


def place_of(folder: Path, seed: int, bound: int) -> Path:
    return folder / f"seed_{seed}_staleness_{bound}"


def train(task: str, folder: Path, seed: int, bound: int, steps: int) -> None:
    from posttrain.build.train import train_run

    place = place_of(folder, seed, bound)
    if place.is_dir() and steps in read_run(place).series(ACCURACY):
        return
    overrides = {
        "run.seed": str(seed),
        "run.folder": str(place),
        "run.total_steps": str(steps),
        "validation.every_steps": str(every(steps)),
        "loss.rollout_correction.weights": "token",
        "asynchronous.mode": "colocate" if bound else "off",
        "asynchronous.max_staleness_steps": str(bound or 1),
        **(of_the_demo(folder, seed) if task == "demo" else of_numbers(task, folder, seed)),
    }
    with as_file(files("posttrain.cli") / "demo.yaml") as path:
        config: RunConfig = native.load(os.fspath(path), [f"{key}={value}" for key, value in overrides.items()]).config
    train_run(config)


def of_the_demo(folder: Path, seed: int) -> dict[str, str]:
    """The files of the demo's task, written once."""
    from posttrain.cli.demo_run import TASKS
    from posttrain.data.arithmetic import Arithmetic, write_arithmetic
    from posttrain.models.smollm2 import smollm2_135m_instruct

    datasets = [folder / "data" / str(seed) / task.name for task in TASKS]
    for task, dataset in zip(TASKS, datasets, strict=True):
        if not (dataset / "validation.parquet").exists():
            write_arithmetic(
                dataset,
                Arithmetic(task=task.name),
                train_rows=task.train_rows,
                validation_rows=task.validation_rows,
                seed=seed,
            )
    return {
        "model.path": str(smollm2_135m_instruct()),
        "data.train_files": f"[{','.join(str(each / 'train.parquet') for each in datasets)}]",
        "data.validation_files": f"[{','.join(str(each / 'validation.parquet') for each in datasets)}]",
        "checkpoint.at_end": "false",
    }


def of_numbers(task: str, folder: Path, seed: int) -> dict[str, str]:
    """A random model, numbers to train on and others to be asked for; which, the seed decides."""
    from posttrain.models.tiny import write_tiny_model

    place = folder / "data" / str(seed)
    if not (place / "model").is_dir():
        write_tiny_model(place / "model", seed=seed)
    numbers = list(range(100, 1000))
    random.Random(seed).shuffle(numbers)
    for name, some in (("train", numbers[:800]), ("validation", numbers[800:])):
        rows = [{"prompt": f"{number}=", "answer": "digits", "data_source": task} for number in some]
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = place / "reward.py"
    reward.write_text(REWARDS[task])
    return {
        "model.path": str(place / "model"),
        "model.compute_dtype": "float32",
        "data.train_files": f"[{place / 'train.jsonl'}]",
        "data.validation_files": f"[{place / 'validation.jsonl'}]",
        "data.prompts_per_step": "16",
        "rollout.samples_per_prompt": "8",
        "rollout.max_response_tokens": "8",
        "rollout.temperature": "1.0",
        # Responses end at one of 32 of 259 tokens, so their lengths differ.
        "rollout.stop_token_ids": str(list(range(0, 256, 8))),
        "reward.terms": f"[{{name: score, path: {reward}}}]",
        "policy.optimizer.lr": "2e-3" if task == "digits" else "5e-4",
        "checkpoint.at_end": "false",
    }


def every(steps: int) -> int:
    return max(steps // 4, 1)


def titles(steps: int) -> list[str]:
    return [f"step {step}" for step in range(0, steps + 1, every(steps))]


def table(folder: Path, bounds: list[int], seeds: list[int]) -> list[list[str]]:
    rows = []
    for bound in bounds:
        runs = [read_run(place) for seed in seeds if (place := place_of(folder, seed, bound)).is_dir()]
        if not runs:
            continue
        curves = [[value or 0.0 for value in run.series(ACCURACY).values()] for run in runs]
        ages = [value or 0.0 for run in runs for value in run.series(STALE).values()]
        points = min(len(curve) for curve in curves)
        cells = []
        for number in range(points):
            found = [curve[number] for curve in curves]
            cells.append(f"{sum(found) / len(found):.3f} ({min(found):.3f} to {max(found):.3f})")
        rows.append([str(bound), f"{sum(ages) / len(ages):.2f}" if ages else "0", *cells, str(len(runs))])
    return rows


if __name__ == "__main__":
    main()
