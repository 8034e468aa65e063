"""The results of an evaluation on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from posttrain.run.evaluation import SourceResult

WIDTH = 80  # columns of the table


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
    if result.right:
        console.print(Text(f"right: {result.right}", style="dim"))
    if result.invalid:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(result.invalid.items()))
        console.print(Text(f"without a score: {sum(result.invalid.values())} ({reasons})", style="bold"))
    console.print()
