"""The screens of ``posttrain show``: the steps of a run, the samples of a step, one sample, and the changes between two
validations. The last line of each screen lists its keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Static

from posttrain.cli.viewer import pages, search
from posttrain.cli.viewer.sample_file import SampleFile
from posttrain.cli.viewer.sample_list import HEADER, SampleList
from posttrain.cli.viewer.words import one_line
from posttrain.report.read import RecordedRun, read_run

Kind = Literal["training", "validation"]
# Columns of the table of steps, in order of preference; the first MOST_COLUMNS that the run has logged are shown.
COLUMNS = {
    "reward": "reward/mean",
    "length": "response/length_mean",
    "no signal": "group/no_signal_share",
    "entropy": "policy/entropy",
    "gap": "gap/mean",
    "seconds": "time/step_s",
    "loss": "policy/loss",
    "held-out loss": "validation/loss",
    "gradient": "policy/grad_norm",
}
MOST_COLUMNS = 6  # as many as fit into 80 characters, with step, accuracy and keys


class Viewer(App[None]):
    """The viewer of one run folder, which it only reads."""

    CSS = """
    .line { height: 1; background: $panel; }
    Input { height: 1; border: none; }
    VerticalScroll { padding: 0 1; }
    DataTable, SampleList { height: 1fr; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [Binding("q", "quit", "Quit")]

    def __init__(self, folder: Path, step: int | None = None, kind: Kind = "training"):
        super().__init__()
        self.folder = folder
        self.run_shown = read_run(folder)
        self._first = (kind, step) if step is not None else None

    def on_mount(self) -> None:
        self.push_screen(Steps())
        if self._first:
            kind, step = self._first
            assert step is not None
            self.push_screen(Samples(kind, step))

    def reload(self) -> None:
        """Read the run folder again, for a run that is still active."""
        self.run_shown = read_run(self.folder)

    def files(self, kind: Kind) -> Mapping[int, Path]:
        return self.run_shown.validation if kind == "validation" else self.run_shown.samples


class Page(Screen[None]):
    """A screen of the viewer, with a status line at the top."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,left", "back", "Back")]

    @property
    def viewer(self) -> Viewer:
        assert isinstance(self.app, Viewer)
        return self.app

    def action_back(self) -> None:
        self.app.pop_screen()

    def show_status(self, text: str) -> None:
        """Show a text in the status line."""
        self.query_one("#line", Static).update(Content(one_line(text, 400)))


class Steps(Page):
    """The table of all steps, scrolled to the last one."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("t", "open('training')", "Samples"),
        Binding("v", "open('validation')", "Held-out"),
        Binding("m", "metrics", "Metrics"),
        Binding("r", "reload", "Reload"),
        Binding("escape,left", "back", "Back", show=False),
    ]

    def compose(self) -> ComposeResult:
        yield Static(id="line", classes="line")
        yield DataTable(cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        self._fill()

    def _fill(self) -> None:
        table, run = self.query_one(DataTable), self.viewer.run_shown
        logged = set(run.metric_names())
        columns = dict([item for item in COLUMNS.items() if item[1] in logged][:MOST_COLUMNS])
        table.clear(columns=True)
        table.add_columns("step", *columns, "accuracy", "keys")
        steps = sorted({*run.metrics, *run.samples, *run.validation})
        for step in steps:
            table.add_row(*_cells(run, step, columns.values()), key=str(step))
        if steps:
            table.move_cursor(row=len(steps) - 1, animate=False)
        status, total = run.info.get("status") or "?", run.info.get("total_steps") or "?"
        notes = f" · {len(run.notes)} notes: {run.notes[0]}" if run.notes else ""
        self.show_status(f"{run.name} · {run.model} · {status}, step {run.steps_done} of {total}{notes}")

    def _step(self) -> int | None:
        table = self.query_one(DataTable)
        if not table.row_count:
            return None
        return int(str(table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value))

    @on(DataTable.RowSelected)
    def _opened(self) -> None:
        self.action_open("training")

    def action_open(self, kind: Kind) -> None:
        step = self._step()
        if step is None or step not in self.viewer.files(kind):
            self.show_status(f"no samples of a {kind} were written at step {step}")
        else:
            self.app.push_screen(Samples(kind, step))

    def action_metrics(self) -> None:
        step = self._step()
        if step is not None:
            self.app.push_screen(TextPage(pages.metrics_page(step, self.viewer.run_shown.metrics.get(step, {}))))

    def action_reload(self) -> None:
        self.viewer.reload()
        self._fill()

    def action_back(self) -> None:
        """No-op: this is the first screen."""


def _cells(run: RecordedRun, step: int, columns: Iterable[str]) -> list[str]:
    metrics = run.metrics.get(step, {})
    numbers = [metrics.get(name) for name in columns]
    accuracy = run.accuracy(step)
    keys = [key for key, files in (("t", run.samples), ("v", run.validation)) if step in files]
    return [
        str(step),
        *("" if value is None else f"{value:.3g}" for value in numbers),
        "" if accuracy is None else f"{accuracy:.3f}",
        " ".join(keys),
    ]


class Samples(Page):
    """The samples of one step or validation."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "order", "Sort"),
        Binding("S", "turn", "Turn"),
        Binding("slash,f", "filter", "Filter"),
        Binding("d", "difference", "Diff"),
    ]

    def __init__(self, kind: Kind, step: int):
        super().__init__()
        self.kind: Kind = kind
        self.step = step
        self.order = "file"
        self.descending = False
        self.condition = ""

    def compose(self) -> ComposeResult:
        self.samples = SampleFile(self.viewer.files(self.kind)[self.step])
        yield Static(id="line", classes="line")
        yield Static(Content(HEADER), classes="line")
        yield SampleList(self.samples.__getitem__, range(len(self.samples)))
        yield Input(placeholder=search.HELP, id="filter")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#filter").display = False
        self.query_one(SampleList).focus()
        self._update_status()

    def _update_status(self) -> None:
        count, all_of_them = len(self.query_one(SampleList).numbers), len(self.samples)
        which = f"{count:,} of {all_of_them:,} samples" if count != all_of_them else f"{count:,} samples"
        order = f"by {self.order}, {'falling' if self.descending else 'rising'}"
        suffix = f" · filter: {self.condition}" if self.condition else ""
        self.show_status(
            f"{self.kind}, step {self.step} · {which} · {order if self.order != 'file' else 'as written'}{suffix}"
        )

    def action_order(self) -> None:
        self.order = search.ORDERS[(search.ORDERS.index(self.order) + 1) % len(search.ORDERS)]
        self._search()

    def action_turn(self) -> None:
        self.descending = not self.descending
        self._search()

    def action_filter(self) -> None:
        box = self.query_one("#filter", Input)
        box.display = True
        box.focus()

    @on(Input.Submitted)
    def _filter_entered(self, event: Input.Submitted) -> None:
        self.condition = event.value.strip()
        event.input.display = False
        self.query_one(SampleList).focus()
        self._search()

    @work(thread=True, exclusive=True)
    def _search(self) -> None:
        """Search for the samples of the filter, in a thread: a large file takes a while, and keys stay responsive."""
        self.app.call_from_thread(self.show_status, f"searching {len(self.samples):,} samples …")
        try:
            numbers = search.chosen(self.samples, self.condition, self.order, descending=self.descending)
        except ValueError as error:
            self.app.call_from_thread(self.show_status, str(error))
            return
        self.app.call_from_thread(self._show_found, numbers)

    def _show_found(self, numbers: Any) -> None:
        self.query_one(SampleList).show_numbers(numbers)
        self._update_status()

    @on(SampleList.Chosen)
    def _open_sample(self, event: SampleList.Chosen) -> None:
        self.app.push_screen(OneSample(self, event.place))

    def action_back(self) -> None:
        box = self.query_one("#filter", Input)
        if box.display:
            box.display = False
            self.query_one(SampleList).focus()
        else:
            self.app.pop_screen()

    def row(self, place: int) -> Mapping[str, Any]:
        """Return the sample at a position of the list."""
        row: Mapping[str, Any] = self.samples[self.query_one(SampleList).numbers[place]]
        return row

    def action_difference(self) -> None:
        listed = self.query_one(SampleList)
        if listed.numbers:
            self.show_difference(self.row(listed.cursor))

    def show_difference(self, row: Mapping[str, Any]) -> None:
        """Compare with the response to the same prompt in the previous validation, or in the next for the first one."""
        steps = sorted(self.viewer.files("validation"))
        if self.kind != "validation" or len(steps) < 2:
            self.show_status("a diff needs two validations of the same prompt: open a step's held-out samples (v)")
            return
        place = steps.index(self.step)
        before, after = (steps[place - 1], self.step) if place else (self.step, steps[1])
        found = [_same_sample(SampleFile(self.viewer.files("validation")[step]), row) for step in (before, after)]
        if found[0] is None or found[1] is None:
            self.show_status(f"step {before if found[0] is None else after} has no sample {row.get('sample_id')}")
        else:
            self.app.push_screen(TextPage(pages.difference_page(found[0], found[1], (before, after))))


def _same_sample(samples: SampleFile, wanted: Mapping[str, Any]) -> Mapping[str, Any] | None:
    name = wanted.get("sample_id")
    return next((row for row in map(samples.parse, range(len(samples))) if row.get("sample_id") == name), None)


class TextPage(Page):
    """A screen with a text to read."""

    def __init__(self, text: Content):
        super().__init__()
        self.text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(self.text, id="text")
        yield Footer()


class OneSample(Page):
    """A complete sample, with keys to move to the next one in the list."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n,right", "move(1)", "Next"),
        Binding("p", "move(-1)", "Previous"),
        Binding("d", "difference", "Diff"),
    ]

    def __init__(self, samples: Samples, place: int):
        super().__init__()
        self.samples = samples
        self.place = place

    def compose(self) -> ComposeResult:
        yield Static(id="line", classes="line")
        with VerticalScroll():
            yield Static(id="text")
        yield Footer()

    def on_mount(self) -> None:
        self._show()

    def _show(self) -> None:
        row = self.samples.row(self.place)
        count = len(self.samples.query_one(SampleList).numbers)
        self.show_status(f"{self.place + 1:,} of {count:,} · {row.get('sample_id') or ''} · step {self.samples.step}")
        self.query_one("#text", Static).update(pages.sample_page(row, self.samples.viewer.folder))
        self.query_one(VerticalScroll).scroll_home(animate=False)

    def action_move(self, by: int) -> None:
        listed = self.samples.query_one(SampleList)
        self.place = min(max(self.place + by, 0), len(listed.numbers) - 1)
        listed.action_to(self.place)
        self._show()

    def action_difference(self) -> None:
        self.samples.show_difference(self.samples.row(self.place))
