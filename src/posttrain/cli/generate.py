"""``posttrain generate``: sample responses to a file of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.cli.errors import placed_by, stopped_at_once
from posttrain.cli.options import Arguments, Dialect, DropUnknown, Here, Out, RowsPerPart, Training


def generate(
    arguments: Arguments = None,
    dialect: Dialect = None,
    drop_unknown: DropUnknown = False,
    here: Here = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start again, replacing existing output.")] = False,
    out: Out = None,
    training: Training = False,
    rows_per_part: RowsPerPart = 32,
) -> None:
    """Sample responses to the prompts of a file; or, from the configuration of a run, play and score its episodes."""
    with stopped_at_once("stopped at once; finished rows are kept"):
        _generate(
            arguments or [],
            dialect,
            here=here,
            drop_unknown=drop_unknown,
            overwrite=overwrite,
            of_a_run={"--out": out, "--training": training, "--rows-per-part": rows_per_part},
        )


def _generate(
    arguments: list[str],
    dialect: str | None,
    *,
    here: bool,
    drop_unknown: bool,
    overwrite: bool,
    of_a_run: Mapping[str, Any],
) -> None:
    from posttrain.cli.beginning import get_ready
    from posttrain.cli.episodes import check_run, only_of_a_run
    from posttrain.cli.hub import with_hub_data
    from posttrain.cli.plan_generate import check_request
    from posttrain.cli.plan_plain import remarks
    from posttrain.cli.progress import WorkProgress
    from posttrain.cli.request import load_request
    from posttrain.dialects.entries import GENERATE, TRAIN

    loaded = load_request(arguments, dialect, GENERATE, or_entry=TRAIN, here=here, drop_unknown=drop_unknown)
    loaded = with_hub_data(loaded)
    of_run = loaded.entry == TRAIN.name
    if of_run:
        check_run(loaded, training=of_a_run["--training"])
    else:
        only_of_a_run(of_a_run, {"--out": "output.file", "--rows-per-part": "output.rows_per_part"})
        loaded = check_request(loaded, look_at_files=True, to_run=True).loaded
    for line in remarks(loaded):
        typer.echo(line, err=True)
    loaded = get_ready(loaded, err=False)

    with WorkProgress("generate", unit="rows", detail="tokens") as progress:

        def on_plan(rows: int, done: int, notes: list[str]) -> None:
            for note in notes:
                typer.echo(note)
            if 0 < done < rows:
                typer.echo(f"resuming after {done} of {rows} rows")
            progress.begin(rows, done)

        # These import torch, which reads the environment that get_ready() has set
        with placed_by(loaded):
            if of_run:
                from posttrain.build.episodes import EpisodesRequest, play_episodes

                file = of_a_run["--out"] or Path(f"{loaded.config.run.name}.episodes.parquet")
                request = EpisodesRequest(
                    config=loaded.config,
                    out=file,
                    training=of_a_run["--training"],
                    rows_per_part=of_a_run["--rows-per-part"],
                    overwrite=overwrite,
                )
                wrote = play_episodes(request, on_plan=on_plan, on_work=progress.advance)
            else:
                from posttrain.build.generate import generate_run

                file = loaded.config.output.file
                wrote = generate_run(loaded.config, overwrite=overwrite, on_plan=on_plan, on_work=progress.advance)
    if wrote:
        typer.echo(f"wrote {file}")
