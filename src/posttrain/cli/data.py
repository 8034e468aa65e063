"""``posttrain data``: write datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from posttrain.errors import Problem, RequestError

app = typer.Typer(help="Write datasets in the format that training reads.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def data() -> None:
    """Write datasets in the format that training reads."""


@app.command("reasoning-gym")
def reasoning_gym(
    out: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="Receives train.parquet and validation.parquet.")],
    task: Annotated[str, typer.Option(help="Name of the task family, such as chain_sum.")],
    train_rows: Annotated[int, typer.Option(min=1, help="Prompts to train on.")] = 2000,
    validation_rows: Annotated[int, typer.Option(min=1, help="Held-out prompts.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the tasks.")] = 1,
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Option of the task, such as max_terms=3. Repeatable.")
    ] = None,
    instruction: Annotated[str | None, typer.Option(help="System message of every prompt.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there already.")] = False,
) -> None:
    """Write train and validation prompts of a reasoning-gym task, with verifiable answers."""
    from posttrain.data.reasoning_gym import write_dataset
    from posttrain.dialects.overrides import parse_overrides

    present = [str(file) for name in ("train", "validation") if (file := out / f"{name}.parquet").exists()]
    if present and not overwrite:
        raise RequestError(
            Problem(f"{' and '.join(present)} already there", fix="name another folder, or add --overwrite")
        )
    files = write_dataset(
        task,
        out,
        train_rows=train_rows,
        validation_rows=validation_rows,
        seed=seed,
        options={each.key: each.value for each in parse_overrides(option or [])},
        instruction=instruction,
    )
    for file in files:
        typer.echo(f"wrote {file}")
