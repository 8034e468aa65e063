"""``posttrain evaluate``: score the responses in a file and compute metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.cli.errors import placed_by, stopped_at_once
from posttrain.cli.options import Arguments, Dialect, DropUnknown
from posttrain.errors import RunStopped

if TYPE_CHECKING:
    from posttrain.run.evaluation import SourceResult

WIDTH = 80  # columns of the table


def evaluate(
    arguments: Arguments = None,
    dialect: Dialect = None,
    drop_unknown: DropUnknown = False,
    json: Annotated[bool, typer.Option("--json", help="Print results.json instead of the table.")] = False,
) -> None:
    """Score the responses of a file."""
    with stopped_at_once("stopped at once; nothing was written"):
        _evaluate(arguments or [], dialect, drop_unknown=drop_unknown, as_json=json)


def _evaluate(arguments: list[str], dialect: str | None, *, drop_unknown: bool, as_json: bool) -> None:
    import sys
    from pathlib import Path

    from posttrain.cli.box_text import box_text
    from posttrain.cli.plan_evaluate import check_request
    from posttrain.cli.plan_plain import remarks
    from posttrain.cli.process import importing
    from posttrain.cli.progress import WorkProgress
    from posttrain.cli.request import load_request
    from posttrain.dialects.entries import EVALUATE

    loaded = check_request(
        load_request(arguments, dialect, EVALUATE, drop_unknown=drop_unknown), look_at_files=True, to_run=True
    ).loaded
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


def print_result(result: SourceResult) -> None:
    """Print the metrics of one data source as a table of at most WIDTH columns."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=WIDTH, highlight=False, markup=False, emoji=False)
    console.print(Text(f"{result.source}: {result.prompts} prompts, {result.responses} responses", style="bold"))
    table = Table(box=None, pad_edge=False)
    for name, justify in (("metric", "left"), ("value", "right"), ("interval", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name, value in result.metrics.items():
        interval = result.intervals.get(name)
        table.add_row(
            Text(name), f"{value:.4f}", f"{interval[0]:.4f} to {interval[1]:.4f}" if interval is not None else ""
        )
    console.print(table)
    console.print(Text(f"majority vote: {result.majority}", style="dim"))
    if result.invalid:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(result.invalid.items()))
        console.print(Text(f"without a score: {sum(result.invalid.values())} ({reasons})", style="bold"))
    console.print()
