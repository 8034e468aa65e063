"""A list of samples that renders only the visible lines, for any number of samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from rich.cells import set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from posttrain.cli.viewer.words import one_line

HEADER = f"{'#':>6} {'reward':>8} {'adv':>7} {'tokens':>6} {'end':<9} response"


class SampleList(ScrollView, can_focus=True):
    """A list of a step's samples, by number in their file. Enter posts Chosen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown,space", "page(1)", "Page down", show=False),
        Binding("home,g", "to(0)", "First", show=False),
        Binding("end,G", "to(-1)", "Last", show=False),
        Binding("enter", "choose", "Open"),
    ]

    class Chosen(Message):
        """The user opened a sample; ``place`` is its position in the list."""

        def __init__(self, place: int):
            super().__init__()
            self.place = place

    def __init__(self, row: Callable[[int], Mapping[str, Any]], numbers: Sequence[int]):
        super().__init__()
        self._row = row
        self.numbers = numbers
        self.cursor = 0

    def on_mount(self) -> None:
        self.show_numbers(self.numbers)

    def show_numbers(self, numbers: Sequence[int]) -> None:
        """Show the samples with these numbers, in this order."""
        self.numbers = numbers
        self.virtual_size = Size(0, len(numbers))
        self.action_to(0)

    def render_line(self, y: int) -> Strip:
        place = self.scroll_offset.y + y
        width = self.size.width
        if place >= len(self.numbers):
            return Strip.blank(width, self.rich_style)
        number = self.numbers[place]
        style = self.rich_style + Style(reverse=place == self.cursor)
        return Strip([Segment(set_cell_size(line_of(number, self._row(number), width), width), style)], width)

    def action_move(self, by: int) -> None:
        self.action_to(min(max(self.cursor + by, 0), max(len(self.numbers) - 1, 0)))

    def action_page(self, by: int) -> None:
        self.action_move(by * max(self.size.height - 1, 1))

    def action_to(self, place: int) -> None:
        """Move the cursor to a position of the list; -1 is the last."""
        self.cursor = place if place >= 0 else max(len(self.numbers) - 1, 0)
        top, height = self.scroll_offset.y, max(self.size.height, 1)
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False, force=True)
        elif self.cursor >= top + height:
            self.scroll_to(y=self.cursor - height + 1, animate=False, force=True)
        self.refresh()

    def action_choose(self) -> None:
        if self.numbers:
            self.post_message(self.Chosen(self.cursor))


def line_of(number: int, row: Mapping[str, Any], width: int) -> str:
    """Format a sample in one line; missing values stay empty."""
    if "damaged" in row:
        return f"{number:>6} not a JSON object: {one_line(row['damaged'], width)}"
    invalid = row.get("invalid")
    reward = "invalid" if invalid else _number(row.get("reward"), "8.4g")
    return (
        f"{number:>6} {reward:>8} {_number(row.get('advantage'), '+7.2f'):>7} {_number(row.get('response_tokens'), 'd'):>6} "
        f"{one_line(str(row.get('stop_reason') or ''), 9):<9} {one_line(str(row.get('response') or ''), width)}"
    )


def _number(value: Any, form: str) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return format(int(value) if form == "d" else value, form) if is_number else ""
