"""A static picture comparing runs, for a README: plain SVG, readable on light and dark pages."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from posttrain.errors import Problem, RequestError
from posttrain.libraries.disk_errors import naming
from posttrain.libraries.folders import make_folder
from posttrain.report.read import RecordedRun, read_run

PANEL_WIDTH, PANEL_HEIGHT = 400, 250  # px of one panel's plotting area
LEFT, RIGHT, TOP, BOTTOM = 56, 20, 44, 46  # px around it, for labels
LEGEND_HEIGHT = 34  # px

# The picture has a background of its own: a page's colours do not always follow the system's.
STYLE = """
.ground{fill:#ffffff;stroke:#d9dbd6} .text{fill:#1f2429} .soft{fill:#5f6973} .grid{stroke:#e5e7e3}
.line{fill:none;stroke-width:2.2;stroke-linejoin:round} .raw{fill:none;stroke-width:1;opacity:.3}
text{font:13px system-ui,"Segoe UI",Helvetica,Arial,sans-serif} .title{font-size:15px;font-weight:600} .soft{font-size:12px}
.s0{stroke:#2a74b5} .s1{stroke:#d07a1d} .s2{stroke:#2f8f5b} .s3{stroke:#8059bd} .s4{stroke:#c24b47} .s5{stroke:#1f8f93}
.d0{fill:#2a74b5} .d1{fill:#d07a1d} .d2{fill:#2f8f5b} .d3{fill:#8059bd} .d4{fill:#c24b47} .d5{fill:#1f8f93}
@media (prefers-color-scheme:dark){
.ground{fill:#171b1f;stroke:#30363c} .text{fill:#e3e6e8} .soft{fill:#9aa4ad} .grid{stroke:#2c3238}
.s0{stroke:#64a9e6} .s1{stroke:#eda14f} .s2{stroke:#64bd8b} .s3{stroke:#ab8ae0} .s4{stroke:#e57f7a} .s5{stroke:#56bfc2}
.d0{fill:#64a9e6} .d1{fill:#eda14f} .d2{fill:#64bd8b} .d3{fill:#ab8ae0} .d4{fill:#e57f7a} .d5{fill:#56bfc2}}
"""
COLORS = 6

Points = list[tuple[int, float]]  # step, value


def write_curves_svg(
    run_dirs: Sequence[Path], out: Path, metrics: Sequence[str] | None = None, labels: Sequence[str] | None = None
) -> Path:
    """Draw one panel per metric against the step, with one line per run, and return ``out``.

    Args: ``metrics``: by default the held-out accuracy of every data source, then the training reward. ``labels``: one per
    run; by default its seed where the runs' seeds differ, else its name.
    Raises: RequestError when a folder is not a run, when there is no run, or when no run logged a requested metric.
    """
    runs = [read_run(Path(folder)) for folder in run_dirs]
    if not runs:
        raise RequestError(Problem("there is no run to draw", fix="name at least one run folder"))
    if metrics is None:
        sources = sorted({source for run in runs for source in run.data_sources()})
        metrics = [*(f"validation/{source}/accuracy" for source in sources), "reward/mean"]
    known = sorted({name for run in runs for name in run.metric_names()})
    if missing := [name for name in metrics if name not in known]:
        what = f"{', '.join(missing)}: not logged by {', '.join(str(run.folder) for run in runs)}"
        raise RequestError(Problem(what, fix=f"known: {', '.join(known)}" if known else "the runs have no metrics yet"))
    labels = list(labels) if labels is not None else _labels(runs)
    if len(labels) != len(runs):
        raise RequestError(Problem(f"{len(labels)} labels for {len(runs)} runs", fix="give one label per run"))
    out = Path(out)
    make_folder(out.parent)
    with naming(out):
        out.write_text(_picture(runs, list(metrics), labels), encoding="utf-8")
    return out


def _picture(runs: list[RecordedRun], metrics: list[str], labels: list[str]) -> str:
    """Render the SVG: panels in rows of two, with a legend below."""
    columns = min(2, len(metrics))
    cell_width, cell_height = LEFT + PANEL_WIDTH + RIGHT, TOP + PANEL_HEIGHT + BOTTOM
    legend = _legend(labels, columns * cell_width)
    height = math.ceil(len(metrics) / columns) * cell_height + LEGEND_HEIGHT * len(legend)
    width = columns * cell_width
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
        f"<title>{xml_text(', '.join(title(name) for name in metrics))}</title><style>{STYLE}</style>",
        f'<rect class="ground" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="10"/>',
    ]
    panels = [[[(s, v) for s, v in run.series(name).items() if v is not None] for run in runs] for name in metrics]
    steps = [step for curves in panels for points in curves for step, _ in points] or [0]
    for index, (metric, curves) in enumerate(zip(metrics, panels, strict=True)):
        x, y = index % columns * cell_width, index // columns * cell_height
        panel = _panel(title(metric), curves, min(steps), max(steps))
        parts.append(f'<g transform="translate({x + LEFT} {y + TOP})">{panel}</g>')
    for row, entries in enumerate(reversed(legend)):
        y = height - 18 - row * LEGEND_HEIGHT
        for x, color, label in entries:
            parts.append(f'<rect class="d{color}" x="{x}" y="{y - 9}" width="18" height="4" rx="2"/>')
            parts.append(f'<text class="text" x="{x + 26}" y="{y - 2}">{xml_text(label)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(heading: str, curves: list[Points], first: int, last: int) -> str:
    """Render one metric from step ``first`` to ``last``: title, axes, a line per run; a dense curve is drawn thin, with a thick
    smoothed line over it."""
    low, high, tick = axis([value for points in curves for _, value in points] or [0.0])

    def at(point: tuple[int, float]) -> str:
        x = (point[0] - first) / max(1, last - first) * PANEL_WIDTH
        return f"{x:.1f} {PANEL_HEIGHT - (point[1] - low) / (high - low) * PANEL_HEIGHT:.1f}"

    parts = [f'<text class="text title" x="0" y="-18">{xml_text(heading)}</text>']
    for i in range(round((high - low) / tick) + 1):
        height = PANEL_HEIGHT - i * tick / (high - low) * PANEL_HEIGHT
        parts.append(f'<line class="grid" x1="0" x2="{PANEL_WIDTH}" y1="{height:.1f}" y2="{height:.1f}"/>')
        parts.append(f'<text class="soft" x="-8" y="{height + 4:.1f}" text-anchor="end">{low + i * tick:.4g}</text>')
    step_tick = max(1, math.ceil(tick_size(max(1, last - first), 6)))
    for step in range(math.ceil(first / step_tick) * step_tick, last + 1, step_tick):
        x = at((step, low)).split()[0]
        parts.append(f'<text class="soft" x="{x}" y="{PANEL_HEIGHT + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text class="soft" x="{PANEL_WIDTH / 2}" y="{PANEL_HEIGHT + 36}" text-anchor="middle">step</text>')
    for index, points in enumerate(curves):
        color, many = index % COLORS, len(points) >= 15
        if many:
            parts.append(f'<polyline class="raw s{color}" points="{" ".join(map(at, points))}"/>')
        parts.append(
            f'<polyline class="line s{color}" points="{" ".join(map(at, smooth(points) if many else points))}"/>'
        )
        for point in [] if many else points:
            x, y = at(point).split()
            parts.append(f'<circle class="d{color}" cx="{x}" cy="{y}" r="3.5"/>')
    return "".join(parts)


def smooth(points: Points) -> Points:
    """Return the centred mean over about a fifteenth of the run (half of that at the ends), which follows without lag."""
    half = round(len(points) / 30)
    result = []
    for i, (step, _) in enumerate(points):
        window = [value for _, value in points[max(0, i - half) : i + half + 1]]
        result.append((step, sum(window) / len(window)))
    return result


def axis(values: Sequence[float]) -> tuple[float, float, float]:
    """Return lower end, upper end and tick distance of an axis; it starts at 0 unless that would flatten the values."""
    low, high = min(values), max(values)
    if 0 <= low < 0.5 * high:
        low = 0.0
    if low == high:
        low, high = (low - abs(low) * 0.1, high + abs(high) * 0.1) if low else (0.0, 1.0)
    tick = tick_size(high - low, 5)
    return math.floor(low / tick + 1e-9) * tick, math.ceil(high / tick - 1e-9) * tick, tick


def tick_size(span: float, count: int) -> float:
    """Return the 1, 2 or 5 times a power of ten that divides ``span`` into at most ``count`` parts."""
    power = 10.0 ** math.floor(math.log10(span / count))
    return next(factor * power for factor in (1, 2, 5, 10) if span / (factor * power) <= count + 1e-9)


def xml_text(text: str) -> str:
    """Escape text for SVG; characters that XML does not allow become question marks."""
    return escape(re.sub(r"[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text))


def title(metric: str) -> str:
    """Return the title of a panel."""
    if metric == "reward/mean":
        return "Training reward (mean of a step)"
    if metric.startswith("validation/") and metric.endswith("/accuracy"):
        if metric == "validation/accuracy":
            return "Held-out accuracy, all questions"
        return f"Held-out accuracy, {metric.removeprefix('validation/').removesuffix('/accuracy')}"
    return metric


def _labels(runs: list[RecordedRun]) -> list[str]:
    """Label runs by seeds when these differ, else by names, numbered when these are equal."""
    sections = [run.config.get("run") for run in runs]
    seeds = [section.get("seed") if isinstance(section, dict) else None for section in sections]
    if None not in seeds and len(set(seeds)) == len(runs) > 1:
        return [f"seed {seed}" for seed in seeds]
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [f"{name} ({i})" for i, name in enumerate(names, start=1)]


def _legend(labels: list[str], width: int) -> list[list[tuple[int, int, str]]]:
    """Return rows of (x in px, colour, label), broken where a row is full, assuming 8 px per character."""
    rows: list[list[tuple[int, int, str]]] = [[]]
    x = LEFT
    for index, label in enumerate(labels):
        label = label if len(label) <= 60 else label[:57] + "..."
        needed = 26 + 8 * len(label) + 24
        if x + needed > width and rows[-1]:
            rows.append([])
            x = LEFT
        rows[-1].append((x, index % COLORS, label))
        x += needed
    return rows
