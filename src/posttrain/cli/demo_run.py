"""The demo: a model, a dataset, a run and its report, without a model hub."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

import typer

from posttrain.cli.process import prepare
from posttrain.dialects import native
from posttrain.libraries.importing import importing


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """An arithmetic task and its split. Questions are distinct, so no question is in both parts."""

    name: str
    train_rows: int
    validation_rows: int


TASKS = (
    # All 200 one-digit sums and differences.
    Task(name="sums", train_rows=120, validation_rows=80),
    # All 100 one-digit products.
    Task(name="products", train_rows=60, validation_rows=40),
)


def run_demo(folder: Path, seed: int, steps: int, gguf: str | None = None) -> None:
    """Train SmolLM2-135M-Instruct on one-digit arithmetic with GRPO; print held-out accuracy before and after training.

    All files are written to ``folder``; with a kind of GGUF weights also ``folder/model`` with a file for llama.cpp. An
    interrupted demo resumes; a finished one shows its result again.
    """
    datasets = [folder / "data" / task.name for task in TASKS]
    overrides = [
        f"run.seed={seed}",
        f"run.total_steps={steps}",
        f"run.folder={_quoted(folder)}",
        f"data.train_files=[{','.join(_quoted(dataset / 'train.parquet') for dataset in datasets)}]",
        f"data.validation_files=[{','.join(_quoted(dataset / 'validation.parquet') for dataset in datasets)}]",
    ]
    with as_file(files("posttrain.cli") / "demo.yaml") as path:
        config = native.load(os.fspath(path), overrides).config
    prepare(config)

    # The code below imports torch, so prepare() must set the environment first.
    if gguf is not None:
        from posttrain.models.gguf_kinds import check_kind

        check_kind(gguf)
    with importing():
        from posttrain.build.train import train_run
    from posttrain.data.arithmetic import Arithmetic, write_arithmetic
    from posttrain.models.smollm2 import smollm2_135m_instruct
    from posttrain.report.html import write_report

    model = os.fspath(smollm2_135m_instruct())
    for task, dataset in zip(TASKS, datasets, strict=True):
        if not (dataset / "validation.parquet").exists():
            write_arithmetic(
                dataset,
                Arithmetic(task=task.name),
                train_rows=task.train_rows,
                validation_rows=task.validation_rows,
                seed=seed,
            )
    train_run(config.model_copy(update={"model": config.model.model_copy(update={"path": model})}))

    report = write_report([folder])
    typer.echo("")
    typer.echo("held-out accuracy (questions never trained on)")
    for line in accuracy_table(folder):
        typer.echo(f"  {line}")
    typer.echo(f"report: {report}")
    typer.echo(f"every sample: {folder / 'samples'}, {folder / 'validation'}")
    if gguf is None:
        typer.echo(f"the trained model as a Hugging Face folder: posttrain export {folder} OUT_DIR")
        return
    from posttrain.models.gguf_file import named, write_gguf
    from posttrain.run.export import export_checkpoint

    out = folder / "model"
    file = named(out, gguf)
    if not file.exists():
        if not (out / "config.json").exists():
            export_checkpoint(folder, out)
        write_gguf(out, file, gguf)
    typer.echo(f"for llama.cpp: {file}; talk to it: posttrain chat {file} --beside {model}")


def accuracy_table(folder: Path) -> list[str]:
    """Format accuracy before and after training: a line per task and one for all questions."""
    from posttrain.report.read import read_run

    run = read_run(folder)
    rows = []
    for task in TASKS:
        scores = [score or 0.0 for score in run.series(f"validation/arithmetic/{task.name}/accuracy").values()]
        rows.append((task.name, task.validation_rows, scores[0], scores[-1]))
    overall = [score or 0.0 for score in run.series("validation/accuracy").values()]
    rows.append(("all", sum(count for _, count, _, _ in rows), overall[0], overall[-1]))
    return [
        f"{name:<10} {count:>4} questions   {first:.3f} -> {last:.3f}   ({last - first:+.3f})"
        for name, count, first, last in rows
    ]


def _quoted(path: Path) -> str:
    """Quote a path as the value of an override."""
    text = os.fspath(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"
