"""Supervision of a run's Ray workers: prints their output and names a worker that is dead or stopped within seconds."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.backends.runtime.ray.cluster import Cluster, NodeGone, RayArray, WorkerDied
from posttrain.backends.runtime.ray.processes import WorkerProcess, end, state, tail, telling_lines
from posttrain.backends.runtime.ray.worker import Failure, News, PackedGroups
from posttrain.errors import RunStopped
from posttrain.records.notices import Notices

ROUND_S = 0.5  # between two polls of a worker, or longer where there are many
POLLS_PER_S = 32  # of all workers: each takes about half a millisecond of the driver
SILENCE_S = 3.0  # without an answer, after which its process is looked up on its node
SETTLE_S = 4.0  # after an error of one worker, in which another is found to be its cause
PORT_S = 60.0  # to find a free port
LAST_LINES = 8  # of a lost worker, that are shown
DEAD = "has died: it was killed, or crashed"


class WorkerLost(RunStopped):
    """A worker is dead or stopped."""

    def __init__(self, member: Member, text: str):
        super().__init__(text)
        self.member = member


@dataclass(eq=False)
class Member:
    """A worker as the driver sees it."""

    name: str  # "policy rank 1"
    handle: Any
    process: WorkerProcess
    vital: bool = True  # the run cannot go on without it
    trouble: str | None = None  # why it is lost
    last: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    tokens: int = 0  # sampled, not yet reported
    sequences: int = 0  # learned, not yet reported
    groups: list[PackedGroups] = field(default_factory=list)  # finished, not yet fetched
    # A poll without an answer yet: promises of the news and of the arrays beside it, and since when
    asked: tuple[Any, Any, float] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> tuple[int, list[PackedGroups]]:
        """Return tokens and groups since the last call."""
        with self.lock:
            found = self.tokens, self.groups
            self.tokens, self.groups = 0, []
        return found

    def take_sequences(self) -> int:
        """Return the sequences that it has learned since the last call."""
        with self.lock:
            found, self.sequences = self.sequences, 0
        return found

    @property
    def file_name(self) -> str:
        """The name of its log, without an ending."""
        return self.name.replace(" ", "_")

    def lost(self) -> WorkerLost:
        place = f"process {self.process.pid} on {self.process.host}"
        printed = "".join(f"\n  {line}" for line in self.last)
        said = f"; its last lines:{printed}" if printed else "; it had printed nothing"
        return WorkerLost(self, f"{self.name} ({place}) {self.trouble}{said}")


class Watch:
    """Polls every member twice a second, of more than 16 members each less often, in a thread of its own.

    Args: logs is the folder that gets a file per worker with what it prints, and one with the end of that for a lost worker;
        ``show`` is given each line with its worker's name.
    """

    def __init__(
        self, cluster: Cluster, notices: Notices, logs: Path | None, show: Callable[[str], None] | None = None
    ):
        self.cluster = cluster
        self.members: list[Member] = []
        self._changing = threading.Lock()  # members: samplers are replaced in a thread of their own
        self._notices = notices
        self._logs = logs
        self._show = show or _to_stderr
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="worker-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, member: Member) -> None:
        """Supervise this worker, too, and write its process into the folder of logs."""
        with self._changing:
            self.members = [*self.members, member]
            if self._logs:
                self._logs.mkdir(parents=True, exist_ok=True)
                found = {each.name: each.process.place for each in self.members}
                (self._logs / "workers.json").write_text(json.dumps(found, indent=1) + "\n")

    def remove(self, member: Member) -> None:
        """Kill a worker and forget it. What it had printed stays in its file."""
        with self._changing:
            self.members = [each for each in self.members if each is not member]
        with suppress(NodeGone):
            self.cluster.on_node(member.process.node, end, member.process)
        self.cluster.kill(member.handle)

    def close(self) -> None:
        """The last lines are fetched, then every worker is killed, wherever it stands."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout=SILENCE_S)
        for member in self.members:
            self.remove(member)

    def free_port(self, member: Member) -> int:
        """Return a port that is free where a worker runs, for processes that meet there."""
        promise = self.cluster.call(member.handle, "free_port")
        found: int = self.wait({member: promise}, "a free port", PORT_S)[member]
        return found

    def wait(
        self,
        promises: Mapping[Member, Any],
        what: str,
        deadline_s: float,
        on_round: Callable[[], None] | None = None,
        moved: Callable[[], bool] | None = None,
    ) -> dict[Member, Any]:
        """Wait for the results of calls to several workers.

        Args: ``what`` they do, for messages; ``on_round`` is called several times a second meanwhile; ``moved`` tells whether a
            part of the work has ended since it was last called, from when on the deadline counts again.
        Raises: WorkerLost for a worker that is dead or stopped; RunStopped when one does not finish in time; an error that
            happened in a worker, as if it had happened here.
        """
        begun = time.monotonic()
        results: dict[Member, Any] = {}
        waiting = {promise: member for member, promise in promises.items()}
        failed_at: float | None = None
        while waiting or failed_at:
            for promise in self._kept(list(waiting)):
                member = waiting.pop(promise)
                try:
                    results[member] = self.cluster.value(promise, deadline_s)
                except WorkerDied as died:
                    self.found_dead(member, died)
            if on_round:
                on_round()
            if moved and moved():
                begun = time.monotonic()
            for member in (*promises, *self.members):
                if member.trouble and (member.vital or member in promises):
                    raise member.lost()
            failures = {member: each for member, each in results.items() if isinstance(each, Failure)}
            now = time.monotonic()
            if failures:
                # Who loses a neighbour fails in what they do together, and the neighbour is the one to be named: it is
                # given time to be found, unless the error is one that has a name.
                failed_at = failed_at or now
                foreseen = next((member for member, failure in failures.items() if failure.kind), None)
                if foreseen or now - failed_at > SETTLE_S or len(promises) == 1:
                    member = foreseen or next(iter(failures))
                    raise failures[member].error(member.name)
            elif now - begun > deadline_s:
                late = ", ".join(member.name for member in waiting.values())
                raise RunStopped(f"{what}: no answer of {late} within {deadline_s:g} s (placement.call_timeout_s)")
        return results

    def _kept(self, promises: list[Any]) -> list[Any]:
        if not promises:
            time.sleep(0.1)
            return []
        return self.cluster.ready(promises, 0.1, whole=True)

    def found_dead(self, member: Member, died: WorkerDied | None = None) -> None:
        """Record that a call has found the worker dead."""
        self._lose(member, (died and died.why) or DEAD)

    def _keep(self) -> None:
        while not self._over.wait(self._pause_s()):
            self._round()
        self._round()

    def _pause_s(self) -> float:
        """Seconds between two polls. A worker that dies while it has a call is found by that, however long they are."""
        return max(ROUND_S, len(self.members) / POLLS_PER_S)

    def _round(self) -> None:
        members = [member for member in self.members if member.trouble is None]
        for member in members:
            if member.asked is None:
                member.asked = *self.cluster.call_for_two(member.handle, "news"), time.monotonic()
        promises = {member.asked[0]: member for member in members if member.asked}
        if not promises:
            return
        time.sleep(min(0.1, ROUND_S))
        for promise in self.cluster.ready(list(promises), ROUND_S):
            member = promises[promise]
            assert member.asked is not None
            (_, beside, _), member.asked = member.asked, None
            try:
                self._tell(member, self.cluster.value(promise, SILENCE_S), beside)
            except WorkerDied as died:
                self.found_dead(member, died)
            except TimeoutError:
                self.found_dead(member)
        for member in members:
            if member.asked and time.monotonic() - member.asked[2] > SILENCE_S:
                self._look(member)

    def _look(self, member: Member) -> None:
        """Look up the process of a silent worker on its node: it may be busy, with Python's lock held."""
        try:
            found = self.cluster.on_node(member.process.node, state, member.process)
        except NodeGone as gone:
            self._lose(member, f"is lost: {gone}")
            return
        if found == "stopped":
            self._lose(member, "is stopped: it got SIGSTOP, or a debugger holds it")
        elif found == "gone":
            self.found_dead(member)

    def _lose(self, member: Member, why: str) -> None:
        if member.trouble is None:
            with suppress(NodeGone):
                # The file also has the output since the last poll.
                text = self.cluster.on_node(member.process.node, tail, member.process.log)
                member.last = deque(telling_lines(text, LAST_LINES) or member.last)
                if self._logs and text:
                    with open(self._logs / f"{member.file_name}.end.log", "a", encoding="utf-8") as file:
                        file.write(text)
            member.trouble = why
            self._show(f"[{member.name}] {why}")

    def _tell(self, member: Member, news: News, beside: Any) -> None:
        member.last.extend(news.lines)
        with member.lock:
            member.tokens += news.tokens
            member.sequences += news.sequences
            member.groups += [news.groups.joined(partial(RayArray, beside))] if news.groups.message.numbers else []
        for text in news.notices:
            self._notices.add(f"{member.name}: {text}")
        for line in news.lines:
            self._show(f"[{member.name}] {line}")
        if self._logs and news.lines:
            with open(self._logs / f"{member.file_name}.log", "a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in news.lines)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
