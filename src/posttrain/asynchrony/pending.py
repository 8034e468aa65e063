"""Groups that are admitted and not trained, counted so that no question about them looks at all of them."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter
from dataclasses import dataclass
from itertools import takewhile


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A group that was admitted and is neither trained, filtered nor dropped."""

    serial: int  # its place in the order of admission, from 0
    prompt_id: str
    draw: int  # number of the loader's batch that its prompt came with, from 1
    attempt: int = 0  # 1 where it replaces a group that was dropped
    started: int  # steps trained when the weights were made that the samplers had at its admission
    admitted: int = 0  # steps trained at its admission
    domain: str = ""


class PendingGroups:
    """The pending groups of one domain, which are added in the order of admission."""

    def __init__(self) -> None:
        self.finished: list[int] = []  # serials, oldest first
        self._entries: dict[int, Entry] = {}  # all, by serial
        self._running: dict[int, Entry] = {}  # those that are being sampled, oldest first
        self._starts = Counter[int]()  # all, by ``started``
        self._newest = 0  # the largest ``started`` so far
        # Younger groups were started later. Groups that a replay admits may not be, and are then counted one by one
        self._in_order = True

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Entry) -> None:
        self._entries[entry.serial] = self._running[entry.serial] = entry
        self._starts[entry.started] += 1
        self._in_order = self._in_order and entry.started >= self._newest
        self._newest = max(self._newest, entry.started)

    def finish(self, serial: int) -> None:
        del self._running[serial]
        insort(self.finished, serial)

    def remove(self, serial: int) -> None:
        """Forget a group, finished or not."""
        entry = self._entries.pop(serial)
        if self._running.pop(serial, None) is None:
            self.finished.remove(serial)
        self._starts[entry.started] -= 1
        if not self._starts[entry.started]:
            del self._starts[entry.started]

    def due_by(self, started: int) -> int:
        """Count the groups that were started by this step."""
        return sum(count for start, count in self._starts.items() if start <= started)

    def oldest_due_by(self, started: int, number: int) -> int:
        """Count those of so many oldest finished ones."""
        if self._in_order:
            end = min(number, len(self.finished))
            return bisect_right(self.finished, started, hi=end, key=lambda serial: self._entries[serial].started)
        return sum(self._entries[serial].started <= started for serial in self.finished[:number])

    def running_due_by(self, started: int) -> list[Entry]:
        """Return those that are being sampled, oldest first."""
        running = self._running.values()
        if self._in_order:
            return list(takewhile(lambda entry: entry.started <= started, running))
        return [entry for entry in running if entry.started <= started]
