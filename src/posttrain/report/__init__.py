"""Reports of run folders: one offline HTML page, the same page live, and static curves. Reads files only; no torch."""

from posttrain.report.curves import write_curves_svg
from posttrain.report.html import write_report
from posttrain.report.read import RecordedRun, read_run

__all__ = ["RecordedRun", "read_run", "write_curves_svg", "write_report"]
