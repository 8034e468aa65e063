"""What a run folder says about itself, for people: one offline HTML page, the same page live, and static curves.
Reads files only; no torch."""

from posttrain.report.curves import write_curves_svg
from posttrain.report.html import write_report
from posttrain.report.read import Run, read_run

__all__ = ["Run", "read_run", "write_curves_svg", "write_report"]
