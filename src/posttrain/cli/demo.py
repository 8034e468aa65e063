"""``posttrain demo``: train a small real model on a small real task, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    folder: Annotated[Path | None, typer.Option(help="Folder of the run; by default runs/demo-seed-N.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of data and sampling.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Steps of training; the documented result is that of 40.")] = 40,
    gguf: Annotated[
        str | None,
        typer.Option(
            metavar="KIND", help="Also write the trained model to FOLDER/model as GGUF, for llama.cpp: q8_0, f16, ..."
        ),
    ] = None,
) -> None:
    """Train a 135M model with GRPO on real tasks, on this machine."""
    from posttrain.cli.demo_run import run_demo

    run_demo(folder or Path(f"runs/demo-seed-{seed}"), seed, steps, gguf)
