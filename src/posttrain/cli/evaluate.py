"""``posttrain evaluate``: score the responses in a file and compute metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli.errors import placed_by, stopped_at_once
from posttrain.cli.options import Arguments, Dialect, DropUnknown, Here, Out, RowsPerPart, Training
from posttrain.errors import RunStopped

if TYPE_CHECKING:
    from posttrain.dialects.loaded import LoadedConfig

Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="NAME=PATH",
        help="Of a run's configuration: a model folder, checkpoint or run in place of model.path; several are compared.",
    ),
]


def evaluate(
    arguments: Arguments = None,
    dialect: Dialect = None,
    drop_unknown: DropUnknown = False,
    here: Here = False,
    json: Annotated[bool, typer.Option("--json", help="Print results.json instead of the table.")] = False,
    model: Models = None,
    out: Out = None,
    training: Training = False,
    pass_score: Annotated[
        float | None,
        typer.Option(
            help="Of a run's configuration: least reward of a right episode; by default the environment's success, or 1."
        ),
    ] = None,
    rows_per_part: RowsPerPart = 32,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Of a run's configuration: play finished episodes again.")
    ] = False,
) -> None:
    """Score the responses of a file; or, from the configuration of a run, play its validation episodes and measure them."""
    from posttrain.cli.episodes import evaluate_run_config, only_of_a_run
    from posttrain.cli.hub import with_hub_data
    from posttrain.cli.request import load_request
    from posttrain.dialects.entries import EVALUATE, TRAIN

    of_a_run = {
        "--model": model or [],
        "--out": out,
        "--training": training,
        "--pass-score": pass_score,
        "--rows-per-part": rows_per_part,
        "--overwrite": overwrite,
        "--here": here,
    }
    loaded = load_request(arguments or [], dialect, EVALUATE, or_entry=TRAIN, here=here, drop_unknown=drop_unknown)
    loaded = with_hub_data(loaded)
    if loaded.entry == TRAIN.name:
        with stopped_at_once("stopped at once; finished rows are kept"):
            evaluate_run_config(loaded, of_a_run, as_json=json)
        return
    only_of_a_run(of_a_run, {"--out": "output.folder", "--pass-score": "metrics.pass_score"})
    with stopped_at_once("stopped at once; nothing was written"):
        _evaluate(loaded, as_json=json)


def _evaluate(loaded: LoadedConfig[Any], *, as_json: bool) -> None:
    import sys
    from pathlib import Path

    from posttrain.cli.box_text import box_text
    from posttrain.cli.evaluation_text import print_result
    from posttrain.cli.plan_evaluate import check_request
    from posttrain.cli.plan_plain import remarks
    from posttrain.cli.progress import WorkProgress
    from posttrain.libraries.importing import importing

    loaded = check_request(loaded, look_at_files=True, to_run=True).loaded
    config = loaded.config
    for line in [*remarks(loaded), *box_text(config)]:
        typer.echo(line, err=True)
    with importing():
        from posttrain.build.evaluate import evaluate_run

    with (
        WorkProgress("evaluate", unit="prompts", stream=sys.stderr if as_json else None) as progress,
        placed_by(loaded),
    ):
        results = evaluate_run(
            config, on_plan=lambda prompts, responses: progress.begin(prompts), on_scored=progress.advance
        )
    folder = Path(config.folder)
    if as_json:
        typer.echo((folder / "results.json").read_text(encoding="utf-8"), nl=False)
    else:
        for result in results:
            print_result(result)
        typer.echo(f"wrote {folder}: results.json, report.html, dumped_evals/")
    invalid, responses = max((sum(result.invalid.values()), result.responses) for result in results)
    if invalid > config.reward.max_invalid_share * responses:
        raise RunStopped(
            f"{invalid} of {responses} responses have no score, more than reward.max_invalid_share = "
            f"{config.reward.max_invalid_share:g} allows; the reasons are in {folder / 'dumped_evals'}"
        )
