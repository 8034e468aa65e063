"""The ledger of groups: which prompts may be sampled ahead of training, and which finished groups make up the next step.

A group that is admitted while the samplers have the weights of step t holds no token of older weights than those. It may be
trained in the steps t + 1 to t + 1 + S, where S is the bound on staleness, so it is due in the last of these. Two rules keep
every group within its bound without ever waiting for something that cannot come:

- admission: a group is admitted only while all groups that are admitted and not trained fit into the steps up to its due
  one: admitted - trained <= (S + 1 - lag) x B, with B groups per step, where lag is the number of steps trained since the
  samplers got new weights: 0 where they get them after every step;
- choice: a step takes the oldest finished groups. It is ready when what stays fits into the steps that are left to it: for
  every due step d, the groups due by d are no more than B for each step from the next one to d. Otherwise it waits.

Where a step is made up of domains, each with a number of groups, both rules hold for each by itself, with that number as B.

Time is counted in steps. The ledger reads no clock, so a schedule is a function of the order of its calls.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from posttrain.asynchrony.pending import Entry, PendingGroups
from posttrain.config.asynchronous import groups_in
from posttrain.errors import RunStopped

OnStale = Literal["wait", "drop"]
Event = Mapping[str, Any]  # a line of schedule.jsonl


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The limits of a run's asynchrony."""

    groups_per_step: int  # B
    staleness: int  # S, steps
    total_steps: int
    max_running: int | None = None  # groups that are sampled at a time; None: as many as may be admitted
    on_stale: OnStale = "wait"
    # Groups of a step that may be S steps stale; None: all. ROLL's ratio 1.5: S = 2, and half a step's groups.
    oldest_per_step: int | None = None
    domains: Mapping[str, int] = field(default_factory=dict)  # groups of a step by domain; empty: all are alike

    @classmethod
    def of(cls, staleness: float, *, groups_per_step: int, **more: Any) -> Bounds:
        """Bounds with a staleness that need not be whole: at 1.5, half a step's groups (rounded down) may be 2 steps stale."""
        share = groups_in(staleness, groups_per_step) - int(staleness) * groups_per_step
        whole = math.ceil(staleness) if share else int(staleness)
        return cls(groups_per_step=groups_per_step, staleness=whole, oldest_per_step=share or None, **more)

    @property
    def shares(self) -> Mapping[str, int]:
        """Return the groups of a step by domain; all of them under "" without domains."""
        return self.domains or {"": self.groups_per_step}

    def within(self, steps: int, domain: str = "") -> int:
        """Groups that can be trained in so many steps, of which the last finds them at the bound: in that one only
        ``oldest_per_step`` of them, or a domain's share of these."""
        if steps <= 0:
            return 0
        groups = last = self.shares[domain]
        if self.oldest_per_step is not None and self.staleness:
            last = groups * self.oldest_per_step // self.groups_per_step
        return (steps - 1) * groups + last


class Ledger:
    """The groups of a run, from admission to training; each is trained, filtered or dropped once.

    Args: record gets every decision, as it is made.
    """

    def __init__(self, bounds: Bounds, record: Callable[[Event], None] = lambda event: None):
        self.bounds = bounds
        self.steps = 0  # trained
        self.synced = 0  # of these, the ones whose updates the samplers have
        self.admitted = self.trained = self.filtered = self.dropped = 0  # groups
        self.record = record
        self._pending: dict[int, Entry] = {}  # by serial
        self._finished: set[int] = set()
        self._of = self._by_domain()
        self._missing = dict(bounds.shares)  # groups that the step under way still needs, by domain
        self._awaited: Sequence[Entry] | None = []  # None: not found since something has changed

    @property
    def pending(self) -> Sequence[Entry]:
        """Groups that are being sampled or wait to be trained, oldest first."""
        return list(self._pending.values())

    @property
    def running(self) -> Sequence[Entry]:
        """Groups that are being sampled, oldest first."""
        return [entry for entry in self._pending.values() if entry.serial not in self._finished]

    def entry(self, serial: int) -> Entry:
        return self._pending[serial]

    def room(self, domain: str | None = None) -> int:
        """Groups that may be admitted now, of a domain or of all. The last steps of a run admit no more than they can train."""
        bounds = self.bounds
        left = max(bounds.total_steps - self.steps - 1, 0)
        reach = bounds.staleness - (
            self.steps - self.synced
        )  # steps after the one under way in which it may be trained
        if reach < 0 or self.steps >= bounds.total_steps:
            return 0
        room = 0
        for name in bounds.shares if domain is None else [domain]:
            ahead = bounds.within(reach, name) if left >= reach else left * bounds.shares[name]
            room += max(self._missing[name] + ahead - len(self._of[name]), 0)
        if bounds.max_running is not None:
            room = min(room, bounds.max_running - (len(self._pending) - len(self._finished)))
        return max(room, 0)

    @property
    def lacks(self) -> bool:
        """True while fewer groups are pending, of all or of a domain, than the step under way still needs."""
        return any(len(self._of[name]) < missing for name, missing in self._missing.items())

    def admit(
        self,
        prompt_id: str,
        draw: int,
        attempt: int = 0,
        *,
        domain: str = "",
        check: bool = True,
        started: int | None = None,
    ) -> Entry:
        """Admit a group. Raises: ValueError without room for it; with ``check`` False it is not looked at, because the order in
        which recorded decisions are made again within a step is another one; so is that of admissions and syncs, and ``started``
        is then the recorded one."""
        if check and not self.room(domain):
            raise ValueError(
                f"{prompt_id} cannot be trained within {self.bounds.staleness} steps: there is no room for it"
            )
        entry = Entry(
            serial=self.admitted,
            prompt_id=prompt_id,
            draw=draw,
            attempt=attempt,
            started=self.synced if started is None else started,
            admitted=self.steps,
            domain=domain,
        )
        self._pending[entry.serial] = entry
        self._of[domain].add(entry)
        self._awaited = None
        self.admitted += 1
        self._note_admission(entry)
        return entry

    def record_again(self) -> None:
        """Record what happened after the last step of a checkpoint, when the run is resumed from it: its records end there."""
        for entry in self.pending:
            if entry.admitted == self.steps:
                self._note_admission(entry)
                if entry.serial in self._finished:
                    self._note("finished", entry)

    def finish(self, serial: int) -> None:
        """All responses of a group have ended."""
        if serial not in self._pending or serial in self._finished:
            raise ValueError(f"group {serial} is not being sampled")
        entry = self._pending[serial]
        self._finished.add(serial)
        self._of[entry.domain].finish(serial)
        self._awaited = None
        self._note("finished", entry)

    def choice(self) -> Sequence[Entry] | None:
        """The groups that the step under way takes next, oldest first; None while it has to wait for more."""
        oldest: list[int] = []
        for name, missing in self._missing.items():
            found = self._of[name].finished[:missing]
            if len(found) < missing:
                return None
            oldest += found
        if self.bounds.on_stale == "wait" and self.awaited():
            return None
        return [self._pending[serial] for serial in sorted(oldest)]

    def awaited(self) -> Sequence[Entry]:
        """Groups that are being sampled and that the step under way waits for, because they could not be trained in time later;
        oldest first. Empty with ``drop``, and of a domain where finished groups are missing altogether."""
        if self.bounds.on_stale == "drop":
            return []
        if self._awaited is None:
            found = [entry for name in self._missing for entry in self._awaited_of(name)]
            self._awaited = sorted(found, key=lambda entry: entry.serial)
        return self._awaited

    def _awaited_of(self, domain: str) -> Sequence[Entry]:
        groups, missing = self._of[domain], self._missing[domain]
        if len(groups.finished) < missing:
            return []
        for ahead in range(self.bounds.staleness + 1):
            due = self.steps - self.bounds.staleness + ahead  # a group started then is due after ``ahead`` more steps
            left = groups.due_by(due) - groups.oldest_due_by(due, missing)
            if left > self.bounds.within(ahead, domain):
                return groups.running_due_by(due)
        return []

    def take(
        self,
        entries: Sequence[Entry],
        kept: Collection[int],
        wanting: Collection[str] | None = None,
        marks: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """Take finished groups out: those in ``kept`` (serials) are trained in the step under way, the others were filtered.

        Args: wanting, the domains of which the step still needs groups ("" without domains); the others are complete, also where
            a filter has left fewer groups than their share. None: what is missing is what was not kept. marks of the samples of
            kept groups, by serial, are recorded (records.marks).
        """
        for entry in entries:
            staleness = self.steps - entry.started
            if staleness > self.bounds.staleness:
                raise ValueError(
                    f"group {entry.serial} is {staleness} steps old, and the bound is {self.bounds.staleness}"
                )
            self._remove(entry)
            if entry.serial in kept:
                self.trained += 1
                self._missing[entry.domain] = max(self._missing[entry.domain] - 1, 0)
                mark = {"mark": marks[entry.serial]} if entry.serial in marks else {}
                self._note("consumed", entry, staleness=staleness, **mark)
            else:
                self.filtered += 1
                self._note("filtered", entry, staleness=staleness)
        if wanting is not None:
            self._missing = {name: count if name in wanting else 0 for name, count in self._missing.items()}
        self._awaited = None

    @property
    def outdated(self) -> Sequence[Entry]:
        """Groups that can no longer be trained within the bound once the step under way has been trained."""
        return [entry for entry in self._pending.values() if entry.started + self.bounds.staleness <= self.steps]

    def end_step(self, *, synced: bool = True) -> Sequence[Entry]:
        """The step under way has been trained, and the samplers have its weights (``synced``). Returns: the groups that can no
        longer be trained within the bound, which are dropped; with ``wait`` there are none."""
        gone = self.outdated
        if gone and self.bounds.on_stale == "wait":
            raise ValueError(f"group {gone[0].serial} was not trained in time")
        for entry in gone:
            self._remove(entry)
            self._note("dropped", entry)
        self.dropped += len(gone)
        self.steps += 1
        self._missing, self._awaited = dict(self.bounds.shares), None
        if synced:
            self.sync()
        return gone

    @contextmanager
    def in_the_step_before(self) -> Iterator[None]:
        """A block in which groups are entered as if the last step were still under way, with its weights in the samplers."""
        steps, synced = self.steps, self.synced
        self.steps, self.synced, self._awaited = steps - 1, steps - 1, None
        try:
            yield
        finally:
            self.steps, self.synced, self._awaited = steps, synced, None

    def sync(self) -> None:
        """The samplers have got the weights of the steps trained so far."""
        self.synced = self.steps

    def state(self) -> dict[str, Any]:
        """Plain values from which ``restore`` resumes; to be called between two steps."""
        assert self._missing == self.bounds.shares, "a step is under way"
        return {
            "steps": self.steps,
            "admitted": self.admitted,
            "trained": self.trained,
            "filtered": self.filtered,
            "dropped": self.dropped,
            "pending": [asdict(entry) for entry in self._pending.values()],
            "finished": sorted(self._finished),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises: RunStopped when the saved groups do not fit into the bounds of this run."""
        self.steps = self.synced = int(state["steps"])
        self.admitted, self.trained = int(state["admitted"]), int(state["trained"])
        self.filtered, self.dropped = int(state["filtered"]), int(state["dropped"])
        self._pending = {int(each["serial"]): Entry(**each) for each in state["pending"]}
        self._finished = set(state["finished"])
        self._missing, self._awaited = dict(self.bounds.shares), None
        if unknown := sorted({entry.domain for entry in self._pending.values()} - self._missing.keys()):
            named = f"of the domain {unknown[0]}" if unknown[0] else "of no domain"
            raise RunStopped(
                f"the checkpoint holds groups {named}, which this run has not; set data.domains back to resume"
            )
        self._of = self._by_domain()
        for name in self._missing if self.bounds.on_stale == "wait" else ():
            self._check_restored(name)

    def _by_domain(self) -> Mapping[str, PendingGroups]:
        found = defaultdict[str, PendingGroups](PendingGroups)
        for entry in self._pending.values():
            found[entry.domain].add(entry)
        for serial in self._finished:
            found[self._pending[serial].domain].finish(serial)
        return found

    def _check_restored(self, domain: str) -> None:
        bounds = self.bounds
        started = [entry.started for entry in self._pending.values() if entry.domain == domain]
        of_domain, size = (f" of {domain}", f"data.domains.{domain}") if domain else ("", "data")
        for ahead in range(-1, bounds.staleness + 1):
            due = self.steps - bounds.staleness + ahead
            old = sum(each <= due for each in started)
            if old > bounds.within(ahead + 1, domain):
                raise RunStopped(
                    f"{old} groups{of_domain} in the checkpoint cannot be trained in {ahead + 1} steps of "
                    f"{bounds.shares[domain]} groups, as asynchronous.max_staleness_steps = "
                    f"{bounds.staleness} demands; set it and {size}.prompts_per_step back to resume"
                )

    def start_after(self, step: int) -> None:
        """Start with no group, after the steps of a synchronous run."""
        self.steps = self.synced = step
        self._awaited = None

    def _remove(self, entry: Entry) -> None:
        del self._pending[entry.serial]
        self._finished.discard(entry.serial)
        self._of[entry.domain].remove(entry.serial)

    def _note_admission(self, entry: Entry) -> None:
        behind = {} if entry.started == entry.admitted else {"started": entry.started}
        self._note("admitted", entry, attempt=entry.attempt, draw=entry.draw, **behind)

    def _note(self, event: str, entry: Entry, **more: Any) -> None:
        self.record(
            {"step": self.steps + 1, "event": event, "group": entry.serial, "prompt_id": entry.prompt_id, **more}
        )
