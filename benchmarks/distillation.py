"""Tokens that a student samples until it is as good as its teacher, next to those that the teacher's own GRPO sampled.

    python benchmarks/distillation.py FOLDER [--seeds 1,2,3] [--steps 40] [--student KEY=VALUE ...]
    python benchmarks/distillation.py FOLDER --table

For every seed SmolLM2-135M-Instruct learns the demo's task (one-digit sums, differences and products) by GRPO; its last weights
teach a fresh SmolLM2 (examples/distill_chain_sum.yaml, which samples one response to a prompt and compares the whole vocabulary).
The 300 questions of the task are divided once, for all seeds: 150 to train on, 60 to choose a recipe by, 90 by which nothing was
chosen. Both runs measure the two held-out parts as they go; the table's accuracies are of the 90. A finished run is not repeated,
and an interrupted one resumes. --student adds settings to the student's run: its recipe was chosen so, with the 60.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path

from common import print_rows

from posttrain.config import RunConfig
from posttrain.data.arithmetic import Arithmetic, answer_to
from posttrain.dialects import native
from posttrain.report.read import read_run

STUDENT = Path(__file__).parents[1] / "examples" / "distill_chain_sum.yaml"
TOKENS = "step/response_tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="data, runs and teachers are written into it")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument(
        "--steps", type=int, default=40, help="steps of GRPO; the student takes as many tokens as a fifth of its"
    )
    parser.add_argument("--model", help="model folder; default: the demo's")
    parser.add_argument("--student", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--name", default="student", help="name of the student's runs, where several recipes are tried")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    folder, seeds = arguments.folder, [int(each) for each in arguments.seeds.split(",")]
    if not arguments.table:
        from posttrain.models.smollm2 import smollm2_135m_instruct

        write_questions(folder / "data")
        model = arguments.model or str(smollm2_135m_instruct())
        for seed in seeds:
            teacher = train_teacher(folder, model, seed, arguments.steps)
            train_student(folder, model, seed, teacher, arguments.name, arguments.student)
    header = [
        "seed",
        "run",
        "tokens sampled",
        "of GRPO's",
        "accuracy before",
        "at the end",
        "as good as the teacher after",
    ]
    print_rows([*header, "of GRPO's"], [row for seed in seeds for row in rows_of(folder, seed, arguments.name, "test")])


def write_questions(folder: Path) -> None:
    """Divide all questions of the demo's two tasks, in the same way for every seed."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[dict[str, object]]] = {"train": [], "held_out": []}
    for task in (Arithmetic(task="sums"), Arithmetic(task="products")):
        expressions = [task.expression(number) for number in range(task.questions)]
        random.Random(f"distillation {task.task}").shuffle(expressions)
        for number, expression in enumerate(expressions):
            source = ("test", "test", "test", "choose", "choose")[number % 10] if number % 10 < 5 else "train"
            row = {
                "data_source": source,
                "prompt": [{"role": "user", "content": f"Calculate {expression} and answer with the number."}],
                "reward_model": {"ground_truth": str(answer_to(expression))},
            }
            parts["train" if source == "train" else "held_out"].append(row)
    for name, rows in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def train_teacher(folder: Path, model: str, seed: int, steps: int) -> Path:
    from posttrain.run.export import export_checkpoint

    with as_file(files("posttrain.cli") / "demo.yaml") as path:
        run = folder / f"grpo_{seed}"
        train(path, folder, run, seed, [f"model.path={model}", f"run.total_steps={steps}", "validation.every_steps=8"])
    teacher = folder / f"teacher_{seed}"
    if not teacher.exists():
        export_checkpoint(run, teacher)
    return teacher


def train_student(folder: Path, model: str, seed: int, teacher: Path, name: str, settings: Sequence[str]) -> None:
    given = [f"model.path={model}", f"distillation.teachers.grpo.path={teacher}", "validation.every_steps=2"]
    train(STUDENT, folder, folder / f"{name}_{seed}", seed, [*given, *settings])


def train(path: Path, folder: Path, run: Path, seed: int, settings: Sequence[str]) -> None:
    """Train as `posttrain train` does, with the questions of this benchmark and the demo's reward."""
    from posttrain.build.train import train_run

    data = folder / "data"
    overrides = [
        f"run.seed={seed}",
        f"run.folder={run}",
        f"data.train_files=[{data / 'train.jsonl'}]",
        f"data.validation_files=[{data / 'held_out.jsonl'}]",
        "reward.terms=[{name: exact_match, options: {extract: last_number}}]",
        *settings,
    ]
    config: RunConfig = native.load(str(path), overrides).config
    train_run(config)


def rows_of(folder: Path, seed: int, name: str, part: str) -> list[list[str]]:
    """Return the table's rows of a seed: its GRPO, and its student."""
    accuracy = f"validation/{part}/accuracy"
    table: list[list[str]] = []
    goal, whole = 0.0, 1.0
    for label, place in (("GRPO", folder / f"grpo_{seed}"), (name, folder / f"{name}_{seed}")):
        if not place.is_dir():
            continue
        run = read_run(place)
        sampled, curve, total = {0: 0.0}, run.series(accuracy), 0.0
        for step, tokens in run.series(TOKENS).items():
            total += tokens or 0.0
            sampled[step] = total
        values = {step: value or 0.0 for step, value in curve.items()}
        if label == "GRPO":
            goal, whole = values[max(values)], total
        reached = next((sampled[step] for step, value in sorted(values.items()) if value >= goal), None)
        table.append(
            [
                str(seed),
                label,
                f"{total:,.0f}",
                f"{total / whole:.2f}",
                f"{values[0]:.3f}",
                f"{values[max(values)]:.3f}",
                "never" if reached is None else f"{reached:,.0f}",
                "" if reached is None else f"{reached / whole:.2f}",
            ]
        )
    return table


if __name__ == "__main__":
    main()
