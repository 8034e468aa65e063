"""Progress on the console: a live display on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import atexit
import math
import os
import sys
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TextIO

from rich.columns import Columns
from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from posttrain.config import TrainingConfig
from posttrain.registry import TRACKERS

LINE_WIDTH = 80  # longest plain line, characters
SAMPLING = ("rollout", "baseline", "validation")  # phases counted in tokens; the others are counted in sequences
SHOWN = (  # label and metric of the values in the live display
    ("reward", "reward/mean"),
    ("length", "response/length_mean"),
    ("stale", "async/staleness_steps_mean"),
    ("gap", "gap/mean"),
    ("grad norm", "policy/grad_norm"),
    ("tokens/s", "speed/rollout_tokens_per_s"),
)
SHOWN_OF_SFT = (
    ("loss", "policy/loss"),
    ("grad norm", "policy/grad_norm"),
    ("tokens/s", "speed/update_tokens_per_s"),
)


@TRACKERS.register("console")
class Console:
    """Shows a run on ``stream`` (standard output by default). Non-finite numbers and missing metrics never make it raise.

    A terminal gets a live display that is updated in place; a file, a pipe or a dumb terminal gets plain lines.
    """

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream if stream is not None else sys.stdout
        self.live = self._stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
        self._display: Live | None = None
        self._rich = RichConsole(file=self._stream, highlight=False, markup=False, emoji=False) if self.live else None
        self._title = ""
        self._total_steps = 0
        self._step = 0
        self._clock = StepClock()
        self._phase: Phase | None = None
        self._tokens_before: dict[str, int] = {}  # phase -> tokens sampled in its last run
        self._metrics: dict[str, float] = {}
        self._first_accuracy: dict[str, float] = {}
        self._show_keys: Callable[[], None] = lambda: None

    def begin(self, config: TrainingConfig, total_steps: int, first_step: int) -> None:
        self._title = visible(f"{config.run.name}: {os.path.basename(config.model.path.rstrip('/'))}")
        self._total_steps = total_steps
        self._step = first_step - 1
        if self._rich is None:
            resumed = f", from step {first_step}" if 1 < first_step <= total_steps else ""
            self._line(f"{self._title}, {total_steps} steps{resumed}")
            return
        # A redirected stream (2> errors.log) is not captured; one on this terminal is printed above the display.
        self._display = Live(
            get_renderable=self._render,
            console=self._rich,
            refresh_per_second=2,  # a refresh takes 1 to 2 ms of CPU time
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._show_keys = hide_control_keys()
        self._display.start(refresh=True)
        # Ctrl-C and errors end the process without close(): restore the cursor anyway.
        atexit.register(self.close)

    def phase(self, name: str, step: int, total: int | None = None) -> None:
        if self._phase is not None and self._phase.done:
            self._tokens_before[self._phase.name] = self._phase.done
        if name in SAMPLING and total is not None:
            # The total is an upper bound; the size of the last rollout is a better estimate.
            total = min(total, self._tokens_before.get(name, total))
        self._phase = Phase(name, total)
        if step >= 1:
            self._clock.start()

    def advance(self, units: int) -> None:
        if self._phase is not None:
            self._phase.done += units

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        numbers = {name: number for name, value in metrics.items() if (number := as_number(value)) is not None}
        self._step = max(self._step, step)
        self._metrics.update(numbers)
        if step >= 1:
            self._clock.tick(step)
        if self._rich is None and step >= 1:
            left = self._clock.seconds_left(self._total_steps)
            self._line(step_line(step, self._total_steps, numbers, left))
        for line in validation_lines(step, numbers, self._first_accuracy):
            self._line(line)

    def message(self, text: str) -> None:
        for line in text.splitlines():
            self._line(visible(line), cut=False)

    def close(self) -> None:
        """Leave the last state on the screen and restore the terminal. May be called repeatedly."""
        self._phase = None
        if self._display is not None:
            display, self._display = self._display, None
            display.stop()
            self._show_keys()
            atexit.unregister(self.close)

    def _line(self, text: str, cut: bool = True) -> None:
        """Print one line: above the live display, or to the stream."""
        if self._rich is not None:
            self._rich.print(Text(text))
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        text = shorten(text, LINE_WIDTH) if cut else text
        self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        self._stream.flush()

    def _render(self) -> Group:
        """Render the live display: title, steps, the current phase, the last metrics, validation so far."""
        left = self._clock.seconds_left(self._total_steps)
        bars = Table.grid(padding=(0, 1), expand=True)
        bars.add_column(no_wrap=True)
        bars.add_column(ratio=1, min_width=6)
        bars.add_column(no_wrap=True, justify="right")
        bars.add_row(
            Text(f"step {self._step}/{self._total_steps}", style="bold"),
            ProgressBar(total=max(self._total_steps, 1), completed=self._step),
            Text("done" if self._step >= self._total_steps else f"left {duration(left)}"),
        )
        phase = self._phase
        if phase is not None:
            bar = ProgressBar(total=phase.total, completed=min(phase.done, phase.total)) if phase.total else Text("")
            bars.add_row(Text(phase.name), bar, Text(phase.progress(), style="dim"))
        parts: list[Text | Table | Columns] = [Text(self._title, style="dim", no_wrap=True, overflow="ellipsis"), bars]
        shown = [(label, self._metrics[name]) for label, name in labels(self._metrics) if name in self._metrics]
        if shown:
            parts.append(Columns([_labelled(label, short(value)) for label, value in shown], padding=(0, 3)))
        for source, accuracy in accuracies(self._metrics).items():
            parts.append(_labelled(f"accuracy {source}", accuracy_change(self._first_accuracy.get(source), accuracy)))
        return Group(*parts)


class Phase:
    """A phase of a step: the work done so far, and its start."""

    def __init__(self, name: str, total: int | None):
        self.name = name
        self.total = total
        self.done = 0
        self.since = time.monotonic()

    def progress(self) -> str:
        """Format progress, such as ``1204 tokens, 612/s`` and ``16/64 sequences, 28/s``; seconds where no work is counted."""
        seconds = time.monotonic() - self.since
        if not self.done:
            return duration(seconds)
        count = f"{self.done} tokens" if self.name in SAMPLING else f"{self.done}/{self.total or '?'} sequences"
        return count + (f", {short(self.done / seconds)}/s" if seconds > 0.5 else "")


class StepClock:
    """Estimate of the time left, from the mean of the last 20 steps, since step times change with response lengths."""

    def __init__(self) -> None:
        self._stamps: deque[float] = deque(maxlen=21)
        self._last_step = 0

    def start(self) -> None:
        """Record the beginning of the first step; later calls are no-ops."""
        if not self._stamps:
            self._stamps.append(time.monotonic())

    def tick(self, step: int) -> None:
        """Record the end of a step. A second report about the same step is ignored."""
        if step > self._last_step:
            self._stamps.append(time.monotonic())
            self._last_step = step

    def seconds_left(self, total_steps: int) -> float | None:
        """Return the seconds until ``total_steps`` are done; None until one step was timed."""
        if len(self._stamps) < 2:
            return None
        per_step = (self._stamps[-1] - self._stamps[0]) / (len(self._stamps) - 1)
        return max(0.0, (total_steps - self._last_step) * per_step - (time.monotonic() - self._stamps[-1]))


def hide_control_keys() -> Callable[[], None]:
    """Stop the terminal from printing ``^C`` into the live display, which would then be drawn a line too low, twice. Returns: a
    function that restores it. A no-op without a terminal on standard input."""
    try:
        import termios
    except ImportError:  # no terminals of this kind on this system
        return lambda: None
    try:
        stdin = sys.stdin.fileno()
        before = termios.tcgetattr(stdin)
        quiet = [*before[:3], before[3] & ~termios.ECHOCTL, *before[4:]]
        termios.tcsetattr(stdin, termios.TCSANOW, quiet)
    except (OSError, ValueError, AttributeError, termios.error):
        return lambda: None
    return lambda: termios.tcsetattr(stdin, termios.TCSANOW, before)


def step_line(step: int, total_steps: int, metrics: Mapping[str, float], seconds_left: float | None) -> str:
    """Format one step in at most 80 characters; what does not fit is dropped, the least important first."""
    parts = {"step": f"step {step}/{total_steps}"}
    for label, name in labels(metrics):
        if name in metrics and label != "grad norm":
            parts[label] = f"{label} {short(metrics[name])}"
    if seconds_left is not None:
        parts["left"] = f"left {duration(seconds_left)}"
    order = ["step", "reward", "loss", "length", "stale", "tokens/s", "gap", "left"]
    for droppable in ("gap", "tokens/s", "length", "stale", "left"):
        if len(_join(parts, order)) <= LINE_WIDTH:
            break
        parts.pop(droppable, None)
    return _join(parts, order)


def labels(metrics: Mapping[str, float]) -> Iterable[tuple[str, str]]:
    """Return the labels and metrics to show: those of fine-tuning when learned texts are counted, else those of RL."""
    return SHOWN_OF_SFT if "data/learned_tokens" in metrics else SHOWN


def validation_lines(step: int, metrics: Mapping[str, float], first: dict[str, float]) -> list[str]:
    """Return a line per data source validated at this step. ``first`` holds each source's first accuracy, and is updated."""
    lines = []
    if "validation/loss" in metrics:
        lines.append(f"validation at step {step}  loss {short(metrics['validation/loss'])}")
    for source, accuracy in accuracies(metrics).items():
        was = f" (at first {short(first[source])})" if source in first else ""
        first.setdefault(source, accuracy)
        length = metrics.get(f"validation/{source}/length_mean")
        rest = f"accuracy {short(accuracy)}{was}" + (f"  length {short(length)}" if length is not None else "")
        head = f"validation at step {step}  "
        lines.append(head + end_of(visible(source), max(10, LINE_WIDTH - len(head) - len(rest) - 2)) + "  " + rest)
    return lines


def accuracies(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the accuracy by data source, and of all questions together where there are several sources."""
    start, end = "validation/", "/accuracy"
    found = {
        name[len(start) : -len(end)]: value
        for name, value in metrics.items()
        if name.startswith(start) and name.endswith(end) and len(name) > len(start) + len(end)
    }
    if len(found) > 1 and "validation/accuracy" in metrics:
        found["all questions"] = metrics["validation/accuracy"]
    return found


def accuracy_change(first: float | None, now: float) -> str:
    """Format a change, such as ``0.32 at first, now 0.45``."""
    return short(now) if first is None or first == now else f"{short(first)} at first, now {short(now)}"


def short(value: float) -> str:
    """Format a number in few characters: 0.41, 0.0021, 14.2, 612, 12345, 3.1e-05, nan."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-4:
        return f"{value:.1e}"
    if size >= 100:
        return f"{value:.0f}"
    decimals = 1 if size >= 10 else 2 if size >= 0.1 else 4
    return f"{value:.0f}" if value == int(value) else f"{value:.{decimals}f}"


def duration(seconds: float | None) -> str:
    """Format a duration: ``3:20``, ``1:03:20``; ``-:--`` when unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def as_number(value: object) -> float | None:
    """Return the metric as a float; None for other values."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


def visible(text: str) -> str:
    """Escape control and direction characters, so that no name or message can control the terminal."""
    return "".join(f"\\u{ord(c):04x}" if unicodedata.category(c) in ("Cc", "Cf", "Cs") else c for c in text)


def shorten(text: str, width: int) -> str:
    """Shorten a text to at most ``width`` characters."""
    return text if len(text) <= width else text[: width - 3] + "..."


def _join(parts: Mapping[str, str], order: Iterable[str]) -> str:
    return "  ".join(parts[name] for name in order if name in parts)


def _labelled(label: str, value: str) -> Text:
    return Text.assemble((f"{visible(label)} ", "dim"), value, no_wrap=True, overflow="ellipsis")


def end_of(name: str, width: int) -> str:
    """Shorten a name to its last ``width`` characters, which tell it from others: arithmetic/sums, arithmetic/products."""
    return name if len(name) <= width else "..." + name[3 - width :]
